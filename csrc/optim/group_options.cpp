#include "optim/group_options.h"

#include <cmath>

namespace gpucomm {

StepScalars scalars_of(StepMethod method, const GroupOptions& group, const StepOptions& options, uint64_t step,
                       bool fresh) {
  StepScalars k;
  k.grad_scale = options.grad_scale;
  k.grad_after = options.grad_after;
  k.direction = group.maximize ? -1 : 1;
  k.stochastic_rounding = group.stochastic_rounding;
  k.seed = group.seed;
  k.step = step;
  k.step_size = group.lr;
  if (method == StepMethod::kSgd) {
    k.momentum = group.beta1;
    k.dampening = group.beta2;
    k.nesterov = group.nesterov;
    k.l2 = group.weight_decay;
    k.fresh = fresh;
    return k;
  }
  k.beta1 = group.beta1;
  k.beta2 = group.beta2;
  if (method == StepMethod::kLion) {
    k.keep = 1 - group.lr * group.weight_decay;
    return k;
  }
  const auto t = static_cast<double>(step);
  k.unbias = 1 / (1 - std::pow(group.beta1, t));
  k.root = 1 / std::sqrt(1 - std::pow(group.beta2, t));
  k.eps = group.eps;
  if (method == StepMethod::kLamb) {
    k.l2 = group.weight_decay;
    return k;
  }
  k.amsgrad = group.amsgrad;
  k.step_size = group.lr * k.unbias;
  (group.decoupled ? k.keep : k.l2) = group.decoupled ? 1 - group.lr * group.weight_decay : group.weight_decay;
  return k;
}

}  // namespace gpucomm
