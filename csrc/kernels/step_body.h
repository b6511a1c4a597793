// The one source of the step kernels (formulas: step.h), part of kernels_body.h: see there for what may stand here.
//
// A slice is swept in blocks: rows of the computation's type are read (in place where the arrays have that type, else
// widened into a buffer in the L1 cache), one loop applies the rule to them, the parameter's row is rounded to where it
// belongs.
#pragma once

#include "kernels/philox.h"
#include "kernels/step.h"

namespace gpucomm {
namespace {

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

template <class T>
struct StepRow {
  T* w;
  const T* g;
  T* state[kMaxStepStates];
  size_t numel;
};

// The scalars in the type of the computation.
template <class T>
struct StepNumbers {
  explicit StepNumbers(const StepScalars& k)
      : factor(static_cast<T>(k.grad_scale * k.direction)),
        step_size(static_cast<T>(k.step_size)),
        keep(static_cast<T>(k.keep)),
        l2(static_cast<T>(k.l2)),
        momentum(static_cast<T>(k.momentum)),
        undamped(static_cast<T>(1 - k.dampening)),
        beta1(static_cast<T>(k.beta1)),
        rest1(static_cast<T>(1 - k.beta1)),
        beta2(static_cast<T>(k.beta2)),
        rest2(static_cast<T>(1 - k.beta2)),
        root(static_cast<T>(k.root)),
        unbias(static_cast<T>(k.unbias)),
        eps(static_cast<T>(k.eps)) {}
  T factor, step_size, keep, l2, momentum, undamped, beta1, rest1, beta2, rest2, root, unbias, eps;
};

enum class Momentum { kNone, kPlain, kNesterov };

template <class T, bool kL2, Momentum kMomentum, bool kFresh>
struct Sgd {
  using Wide = T;
  static void run(const StepRow<T>& row, const StepNumbers<T>& k, BlockSquares*) {
    T* const w = row.w;
    T* const b = row.state[0];
#pragma GCC ivdep
    for (size_t i = 0; i < row.numel; ++i) {
      T d = row.g[i] * k.factor;
      if constexpr (kL2) d = d + k.l2 * w[i];
      if constexpr (kMomentum != Momentum::kNone) {
        const T buffer = kFresh ? d : k.momentum * b[i] + k.undamped * d;
        b[i] = buffer;
        d = kMomentum == Momentum::kNesterov ? d + k.momentum * buffer : buffer;
      }
      w[i] = w[i] - k.step_size * d;
    }
  }
};

template <class T, bool kL2, bool kAmsgrad>
struct Adam {
  using Wide = T;
  static void run(const StepRow<T>& row, const StepNumbers<T>& k, BlockSquares*) {
    T* const w = row.w;
    T* const first = row.state[0];
    T* const second = row.state[1];
    T* const largest = row.state[2];
#pragma GCC ivdep
    for (size_t i = 0; i < row.numel; ++i) {
      const T kept = w[i] * k.keep;
      T g = row.g[i] * k.factor;
      if constexpr (kL2) g = g + k.l2 * kept;
      const T m = first[i] + k.rest1 * (g - first[i]);
      T v = k.beta2 * second[i] + k.rest2 * (g * g);
      first[i] = m;
      second[i] = v;
      if constexpr (kAmsgrad) {
        // A NaN on either side wins, as in torch.maximum.
        v = ((largest[i] > v) | (largest[i] != largest[i])) ? largest[i] : v;
        largest[i] = v;
      }
      w[i] = kept - (k.step_size * m) / (square_root(v) * k.root + k.eps);
    }
  }
};

template <class T>
struct Lion {
  using Wide = T;
  static void run(const StepRow<T>& row, const StepNumbers<T>& k, BlockSquares*) {
    T* const w = row.w;
    T* const m = row.state[0];
#pragma GCC ivdep
    for (size_t i = 0; i < row.numel; ++i) {
      const T g = row.g[i] * k.factor;
      const T c = k.beta1 * m[i] + k.rest1 * g;
      const T sign = c > 0 ? T(1) : c < 0 ? T(-1) : c;  // 0 and NaN stand for themselves
      w[i] = w[i] * k.keep - k.step_size * sign;
      m[i] = k.beta2 * m[i] + k.rest2 * g;
    }
  }
};

template <class T>
inline T lamb_update(T w, T m, T v, const StepNumbers<T>& k) {
  return (m * k.unbias) / (square_root(v) * k.root + k.eps) + k.l2 * w;
}

template <class T>
struct LambMoments {
  using Wide = T;
  static void run(const StepRow<T>& row, const StepNumbers<T>& k, BlockSquares* squares) {
    const T* const w = row.w;
    T* const first = row.state[0];
    T* const second = row.state[1];
    alignas(64) T update[kStepBlockNumel];
#pragma GCC ivdep
    for (size_t i = 0; i < row.numel; ++i) {
      const T g = row.g[i] * k.factor;
      const T m = first[i] + k.rest1 * (g - first[i]);
      const T v = k.beta2 * second[i] + k.rest2 * (g * g);
      first[i] = m;
      second[i] = v;
      update[i] = lamb_update(w[i], m, v, k);
    }
    squares->param = sum_of_squares(w, row.numel);
    squares->update = sum_of_squares(update, row.numel);
  }

  // Sixteen sums, element i to sum i mod 16, then those in order: the same additions whatever the vectors' width.
  static double sum_of_squares(const T* x, size_t numel) {
    constexpr size_t kSums = 16;
    double sums[kSums] = {};
    size_t i = 0;
    for (; i + kSums <= numel; i += kSums) {
      for (size_t s = 0; s < kSums; ++s) {
        const double value = x[i + s];
        sums[s] += value * value;
      }
    }
    for (size_t s = 0; i < numel; ++i, ++s) sums[s] += static_cast<double>(x[i]) * x[i];
    double total = 0;
    for (size_t s = 0; s < kSums; ++s) total += sums[s];
    return total;
  }
};

template <class T>
struct LambApply {
  using Wide = T;
  static void run(const StepRow<T>& row, const StepNumbers<T>& k, BlockSquares*) {
    T* const w = row.w;
    const T* const first = row.state[0];
    const T* const second = row.state[1];
#pragma GCC ivdep
    for (size_t i = 0; i < row.numel; ++i) w[i] = w[i] - k.step_size * lamb_update(w[i], first[i], second[i], k);
  }
};

// ---- rows: from and to what lies in memory

// Null stays null: not every rule has all arrays.
template <class T>
inline T* at(void* base, size_t begin) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + begin;
}

inline const uint16_t* halves(const void* base, size_t begin) { return static_cast<const uint16_t*>(base) + begin; }
inline uint16_t* halves(void* base, size_t begin) { return static_cast<uint16_t*>(base) + begin; }

inline void widen_row(float* out, const void* base, DType dtype, size_t begin, size_t numel) {
  const uint16_t* in = halves(base, begin);
  if (dtype == DType::kFloat16) {
    widen_halves(out, in, numel);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) out[i] = bfloat_to_float(in[i]);
  }
}

inline void narrow_row(uint16_t* out, const float* in, DType dtype, size_t numel) {
  if (dtype == DType::kFloat16) {
    narrow_to_halves(out, in, numel);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) out[i] = float_to_bfloat(in[i]);
  }
}

// At most kStepBlockNumel elements; see [Note: stochastic rounding].
inline void narrow_row_at_random(uint16_t* out, const float* in, size_t numel, uint64_t first, const StepScalars& k) {
  alignas(64) uint32_t words[kStepBlockNumel / 2 + 4];
  const size_t skipped = first % 8;
  philox(words, first / 8, (skipped + numel + 7) / 8, k.seed, k.step);
  alignas(64) uint16_t bits[kStepBlockNumel + 8];
  for (size_t i = 0; i < skipped + numel; ++i) bits[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t cut = (bits_of(in[i]) + bits[skipped + i]) >> 16;
    out[i] = in[i] != in[i] ? float_to_bfloat(in[i]) : static_cast<uint16_t>(cut);
  }
}

// A parameter's element that is not its master's rounding was written since: the master follows.
inline void follow_row(float* master, const void* param, DType dtype, size_t begin, size_t numel) {
  alignas(64) uint16_t rounded[kStepBlockNumel];
  alignas(64) float written[kStepBlockNumel];
  narrow_row(rounded, master, dtype, numel);
  widen_row(written, param, dtype, begin, numel);
  const uint16_t* now = halves(param, begin);
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) master[i] = rounded[i] == now[i] ? master[i] : written[i];
}

template <class T>
void scale_row(T* g, size_t numel, T scale) {
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) g[i] = g[i] * scale;
}

// wide: the row as it was read, where the gradient has another type.
template <class T>
void finish_grad(const StepSlice& slice, const StepScalars& k, size_t begin, size_t numel, T* wide) {
  if (k.grad_after == GradAfter::kKept) return;
  const bool in_halves = slice.grad_dtype == DType::kFloat16 || slice.grad_dtype == DType::kBFloat16;
  if (k.grad_after == GradAfter::kZeroed) {
    const size_t size = in_halves ? 2 : sizeof(T);
    std::memset(static_cast<char*>(slice.grad) + begin * size, 0, numel * size);
  } else if (!in_halves) {
    scale_row(static_cast<T*>(slice.grad) + begin, numel, static_cast<T>(k.grad_scale));
  } else if constexpr (sizeof(T) == sizeof(float)) {
    scale_row(wide, numel, static_cast<float>(k.grad_scale));
    narrow_row(halves(slice.grad, begin), wide, slice.grad_dtype, numel);
  }
}

// ---- slices

// kReads: the gradient; kWrites: the parameter.
template <class Rule, bool kReads = true, bool kWrites = true>
void sweep(const StepSlice& slice, const StepScalars& scalars, BlockSquares* squares) {
  using T = typename Rule::Wide;
  constexpr bool kFloat = sizeof(T) == sizeof(float);
  const StepNumbers<T> numbers(scalars);
  const bool narrow_param = kFloat && slice.param_dtype != DType::kFloat32;
  const bool narrow_grad = kReads && kFloat && slice.grad_dtype != DType::kFloat32;
  const bool whole = !narrow_param && !narrow_grad && squares == nullptr && scalars.grad_after == GradAfter::kKept;
  const size_t most = whole ? slice.numel : kStepBlockNumel;
  alignas(64) T param_row[kStepBlockNumel];
  alignas(64) T grad_row[kStepBlockNumel];
  for (size_t begin = 0; begin < slice.numel; begin += most) {
    const size_t numel = slice.numel - begin < most ? slice.numel - begin : most;
    StepRow<T> row = {at<T>(slice.param, begin), at<T>(slice.grad, begin), {}, numel};
    for (int s = 0; s < kMaxStepStates; ++s) row.state[s] = at<T>(slice.state[s], begin);
    if constexpr (kFloat) {
      if (narrow_grad) {
        widen_row(grad_row, slice.grad, slice.grad_dtype, begin, numel);
        row.g = grad_row;
      }
      if (narrow_param && slice.master != nullptr) {
        row.w = at<float>(slice.master, begin);
        if (kReads) follow_row(row.w, slice.param, slice.param_dtype, begin, numel);
      } else if (narrow_param) {
        widen_row(param_row, slice.param, slice.param_dtype, begin, numel);
        row.w = param_row;
      }
    }
    Rule::run(row, numbers, squares == nullptr ? nullptr : squares + begin / kStepBlockNumel);
    if constexpr (kFloat && kWrites) {
      uint16_t* const out = halves(slice.param, begin);
      if (narrow_param && scalars.stochastic_rounding && slice.param_dtype == DType::kBFloat16) {
        narrow_row_at_random(out, row.w, numel, slice.first + begin, scalars);
      } else if (narrow_param) {
        narrow_row(out, row.w, slice.param_dtype, numel);
      }
    }
    if constexpr (kReads) finish_grad(slice, scalars, begin, numel, grad_row);
  }
}

template <class T, bool kL2>
void step_sgd(const StepSlice& slice, const StepScalars& k, BlockSquares* none) {
  using enum Momentum;
  if (k.momentum == 0) return sweep<Sgd<T, kL2, kNone, false>>(slice, k, none);
  if (k.nesterov && k.fresh) return sweep<Sgd<T, kL2, kNesterov, true>>(slice, k, none);
  if (k.nesterov) return sweep<Sgd<T, kL2, kNesterov, false>>(slice, k, none);
  if (k.fresh) return sweep<Sgd<T, kL2, kPlain, true>>(slice, k, none);
  sweep<Sgd<T, kL2, kPlain, false>>(slice, k, none);
}

template <class T, bool kL2>
void step_adam(const StepSlice& slice, const StepScalars& k, BlockSquares* none) {
  if (k.amsgrad) return sweep<Adam<T, kL2, true>>(slice, k, none);
  sweep<Adam<T, kL2, false>>(slice, k, none);
}

// The rules, for a type of computation; in the order of StepRule.
template <class T>
struct StepRules {
  static void sgd(const StepSlice& slice, const StepScalars& k, BlockSquares*) {
    k.l2 != 0 ? step_sgd<T, true>(slice, k, nullptr) : step_sgd<T, false>(slice, k, nullptr);
  }
  static void adam(const StepSlice& slice, const StepScalars& k, BlockSquares*) {
    k.l2 != 0 ? step_adam<T, true>(slice, k, nullptr) : step_adam<T, false>(slice, k, nullptr);
  }
  static void lion(const StepSlice& slice, const StepScalars& k, BlockSquares*) { sweep<Lion<T>>(slice, k, nullptr); }
  static void lamb_moments(const StepSlice& slice, const StepScalars& k, BlockSquares* squares) {
    sweep<LambMoments<T>, true, false>(slice, k, squares);
  }
  static void lamb_apply(const StepSlice& slice, const StepScalars& k, BlockSquares*) {
    sweep<LambApply<T>, false, true>(slice, k, nullptr);
  }
};

}  // namespace
}  // namespace gpucomm

#define GPUCOMM_STEP_RULES(T) \
  {StepRules<T>::sgd, StepRules<T>::adam, StepRules<T>::lion, StepRules<T>::lamb_moments, StepRules<T>::lamb_apply}
