#include "transport/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

namespace gpucomm {
namespace {

// One page for the whole process, never unmapped. Null where the kernel (before 4.14) cannot wipe on fork.
const volatile unsigned char* page_wiped_on_fork() {
  static const volatile unsigned char* const page = []()->const volatile unsigned char* {
    const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return nullptr;
    if (madvise(address, bytes, MADV_WIPEONFORK) != 0) {
      munmap(address, bytes);
      return nullptr;
    }
    *static_cast<volatile unsigned char*>(address) = 1;
    return static_cast<unsigned char*>(address);
  }
  ();
  return page;
}

}  // namespace

// The page tells children of the process that made it; a guard that a child makes compares process ids.
ForkGuard::ForkGuard() : here_(page_wiped_on_fork()), pid_(getpid()) {
  if (here_ != nullptr && *here_ == 0) here_ = nullptr;
}

bool ForkGuard::forked() const { return here_ != nullptr ? *here_ == 0 : getpid() != pid_; }

}  // namespace gpucomm
