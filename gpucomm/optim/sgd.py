"""SGD with momentum, in one pass. Nesterov's as in I. Sutskever et al., "On the importance of initialization and
momentum in deep learning", 2013, in torch's form: the first step sets the buffer to the gradient."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from gpucomm.optim import checks, state
from gpucomm.optim.fused import FusedOptimizer, Numbers, Rule


class SGD(FusedOptimizer):
    """torch.optim.SGD's arguments, groups and state; see FusedOptimizer for the last four. No sparse gradients."""

    rule: ClassVar[Rule] = Rule("sgd", states=("momentum_buffer",), required=())

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        zero_grad_in_step: bool = False,
    ):
        super().__init__(params, checks.options(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.check_rates(group)
        if not group["momentum"] >= 0.0:
            raise ValueError(f"Invalid momentum value: {group['momentum']}")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def _keys(self, group: dict[str, Any]) -> state.Keys:
        return state.keys_of(group, self.rule.states if group["momentum"] else (), counts=False)

    def _numbers(self, group: dict[str, Any]) -> Numbers:
        return Numbers(
            lr=float(group["lr"]),
            beta1=float(group["momentum"]),
            beta2=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
        )
