// Hints to the core, one set per architecture; where there is none they do nothing.
#pragma once

namespace gpucomm {

// This core is spinning.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The line will soon be written by this core: have it here, and nowhere else.
inline void prefetch_for_write(const void* address) {
#if defined(__x86_64__)
  // The builtin emits it only where the compiler may assume it. Every 64-bit x86 takes it, the oldest as a no-op.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1, 3);
#endif
}

}  // namespace gpucomm
