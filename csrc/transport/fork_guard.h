// Tells a forked child from the process that loaded the engine, without a system call.
#pragma once

namespace gpucomm {

// True in a child that was forked after the first call in its parent. A child owns nothing of what its parent shares
// with peers: its destructors must leave all of it alone.
class ForkGuard {
 public:
  ForkGuard();
  bool forked() const;

 private:
  const volatile unsigned char* here_;  // on a page that the kernel wipes in a forked child
  int pid_;
};

}  // namespace gpucomm
