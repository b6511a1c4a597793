"""Lion, in one pass. X. Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, program 1."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from gpucomm.optim import checks, state
from gpucomm.optim.fused import FusedOptimizer, Numbers, Rule


class Lion(FusedOptimizer):
    """Steps of one size in each element, in the direction of an interpolation of gradient and momentum.

        c = beta1 m + (1 - beta1) g;  w -= lr (sign(c) + weight_decay w);  m = beta2 m + (1 - beta2) g

    Its learning rate is 3 to 10 times lower than AdamW's, its weight decay as many times higher. An element whose
    gradient is NaN becomes NaN. State: `exp_avg`, `step`. Arguments as Adam's; see FusedOptimizer for the last four.
    """

    rule: ClassVar[Rule] = Rule("lion", states=("exp_avg",), required=("exp_avg",))

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
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
        checks.check_betas(group)

    def _keys(self, group: dict[str, Any]) -> state.Keys:
        return state.keys_of(group, self.rule.states)

    def _numbers(self, group: dict[str, Any]) -> Numbers:
        beta1, beta2 = group["betas"]
        return Numbers(float(group["lr"]), float(beta1), float(beta2), weight_decay=float(group["weight_decay"]))
