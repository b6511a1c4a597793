// ncclConfig_t, read as parseCommConfig reads it: of any size, and of any version of the header.
#pragma once

#include <string>

#include "fake_cuda/nccl/functions.h"

namespace fake_nccl {

// Of the library that this code was linked into: one object file per version.
extern const int kLibraryVersion;

struct Options {
  bool blocking = true;
};

// A null config is that of `inherited`. kInvalidArgument as NCCL gives it; what NCCL would take although it cannot be
// meant (a size that is not that of the version) is reported as a misuse.
Result read_config(const char* function, const Config* config, const Options& inherited, Options* options);

// What the last one that was taken said, as far as this version knows it; its strings are gone but for the name.
Config& last_given();
std::string& last_net_name();

}  // namespace fake_nccl
