// What a step's kernels are told: the formulas of the optimizers, for a stretch of one parameter.
//
// Names: w the parameter, g its gradient, m and v its moments; f = grad_scale * direction, multiplied into g once. All
// is computed in fp32, for fp64 parameters in fp64, and rounded to the parameter's type once; states have the type of
// the computation. Every result depends on its element alone and on nothing that differs between instruction sets, so a
// tensor may be cut anywhere (LAMB's norms: at multiples of kStepBlockNumel).
//
//   kSgd          g = f g + l2 w;  b = momentum b + (1 - dampening) g, b = g where fresh (only with momentum);
//                 w -= step_size d, where d = g without momentum, g + momentum b with nesterov, else b
//   kAdam         w *= keep;  g = f g + l2 w;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;
//                 u = amsgrad ? x = max(x, v) : v;  w -= step_size m / (sqrt(u) root + eps)
//   kLion         c = beta1 m + (1 - beta1) f g;  w = keep w - step_size sign(c);  m = beta2 m + (1 - beta2) f g
//   kLambMoments  m and v as kAdam's, l2 = 0; leaves w alone; adds up w^2 and r^2, r as in kLambApply
//   kLambApply    r = m unbias / (sqrt(v) root + eps) + l2 w;  w -= step_size r
// The sign of a NaN is that NaN.
//
// [Note: stochastic rounding] Element i of the optimizer (parameters one after the other, each beginning at a multiple
// of 8, so that the count does not depend on where anything lies) takes 16 random bits r(i): Philox4x32-10 (Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with key (seed mod 2^32, seed / 2^32) and counter (b mod
// 2^32, b / 2^32, t mod 2^32, t / 2^32), b = i / 8, t the parameter's step, counted from 1, gives four words; element i
// takes word (i mod 8) / 2 of them, its low half where i is even, its high half where it is odd. The fp32 result w
// becomes the bfloat16 whose bits are (bits(w) + r) / 2^16: away from zero with the probability of what is cut off.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace gpucomm {

enum class StepRule : uint8_t { kSgd, kAdam, kLion, kLambMoments, kLambApply };
inline constexpr int kStepRuleCount = 5;

// What becomes of the gradient: left as it is, multiplied by grad_scale, or zeroed.
enum class GradAfter : uint8_t { kKept, kScaled, kZeroed };

inline constexpr int kMaxStepStates = 3;
inline constexpr size_t kStepBlockNumel = 1024;

// Arrays do not overlap. `grad` is written only if it is scaled or zeroed.
struct StepSlice {
  void* param;
  void* grad;    // not read by kLambApply
  void* master;  // fp32, for 16-bit parameters: see below; null: none
  void* state[kMaxStepStates];
  DType param_dtype;  // floating
  DType grad_dtype;   // a 16-bit type or fp32; fp64 if and only if param_dtype is
  size_t numel;
  uint64_t first;  // what [Note: stochastic rounding] counts, of the first element
};
// With a master, that is what is stepped, and the parameter is its rounding to nearest. An element of the parameter
// that is something else was written by somebody since the last step: it becomes the master's.

struct StepScalars {
  double grad_scale = 1;
  double direction = 1;  // -1: maximize
  double step_size = 0;
  double keep = 1;
  double l2 = 0;
  double momentum = 0;
  double dampening = 0;
  double beta1 = 0;
  double beta2 = 0;
  double root = 1;    // 1 / sqrt(1 - beta2^t)
  double unbias = 1;  // 1 / (1 - beta1^t)
  double eps = 0;
  bool nesterov = false;
  bool amsgrad = false;
  bool fresh = false;                // the momentum buffer holds nothing yet
  bool stochastic_rounding = false;  // of bfloat16 parameters without a master
  GradAfter grad_after = GradAfter::kKept;
  uint64_t seed = 0;
  uint64_t step = 0;
};

// Squares, in fp64, of one block of kStepBlockNumel elements, counted from the slice's first.
struct BlockSquares {
  double param;
  double update;
};

// squares: one for each block, kLambMoments only.
using StepKernel = void (*)(const StepSlice& slice, const StepScalars& scalars, BlockSquares* squares);

}  // namespace gpucomm
