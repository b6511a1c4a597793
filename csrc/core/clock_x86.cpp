// x86-64: the time-stamp counter, where it runs at one rate in every power state; else CLOCK_MONOTONIC.
#include <cpuid.h>
#include <x86intrin.h>

#include "core/clock.h"
#include "core/clock_counter.h"

namespace gpucomm {

namespace {

bool has_invariant_counter() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  // Leaf 0x80000007, EDX bit 8: invariant TSC.
  return __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) != 0 && (edx & (1u << 8)) != 0;
}

// Set before the anchor of clock.cpp, and any other object of the library, is constructed.
struct Counter {
  bool invariant = has_invariant_counter();
};
__attribute__((init_priority(101))) const Counter counter;

}  // namespace

uint64_t ticks() { return counter.invariant ? __rdtsc() : static_cast<uint64_t>(monotonic_ns()); }

bool ticks_are_monotonic_ns() { return !counter.invariant; }

}  // namespace gpucomm
