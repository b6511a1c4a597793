// The options of a parameter group, as a program gives them, and the scalars that a kernel takes for one step of it.
#pragma once

#include <cstdint>

#include "kernels/step.h"

namespace gpucomm {

enum class StepMethod : uint8_t { kSgd, kAdam, kLion, kLamb };

struct GroupOptions {
  double lr = 0;
  double beta1 = 0;  // kSgd: momentum
  double beta2 = 0;  // kSgd: dampening
  double eps = 0;
  double weight_decay = 0;
  bool decoupled = false;  // kAdam: weight decay apart from the gradient
  bool amsgrad = false;
  bool nesterov = false;
  bool maximize = false;
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

// The same for all parameters in one step.
struct StepOptions {
  double grad_scale = 1;  // what gradients are multiplied by: unscaling times a clip coefficient
  GradAfter grad_after = GradAfter::kKept;
};

// step: of the parameter, counted from 1. LAMB's step_size is lr: the trust ratio comes on top.
StepScalars scalars_of(StepMethod method, const GroupOptions& group, const StepOptions& options, uint64_t step,
                       bool fresh);

}  // namespace gpucomm
