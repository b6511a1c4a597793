// Compiled once for each library: its version. Which functions a library of that version has is up to its version
// script.
#include "fake_cuda/nccl/config.h"

namespace fake_nccl {

const int kLibraryVersion = FAKE_NCCL_VERSION;

// Every function of the table is defined, or this does not link.
#define FAKE_NCCL_TAKE_ADDRESS(member, symbol, since, ...) reinterpret_cast<void (*)()>(&symbol),
extern void (*const kAllFunctions[])();
void (*const kAllFunctions[])() = {GPUCOMM_NCCL_FUNCTIONS(FAKE_NCCL_TAKE_ADDRESS)};
#undef FAKE_NCCL_TAKE_ADDRESS

}  // namespace fake_nccl
