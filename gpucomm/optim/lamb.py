"""LAMB, in two passes. Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
algorithm 2, with phi(x) = x and no bound on it."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from gpucomm.optim import checks, state
from gpucomm.optim.adam import MOMENTS
from gpucomm.optim.fused import FusedOptimizer, Numbers, Rule


class LAMB(FusedOptimizer):
    """AdamW's update, in each parameter scaled by the norm of the parameter over that of the update.

        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w;  w -= lr ||w|| / ||r|| r

    m and v as Adam's. The trust ratio ||w|| / ||r|| is of each parameter by itself, 1 where either norm is zero.
    Gradients are not clipped. State as Adam's. See FusedOptimizer for the last four arguments.
    """

    rule: ClassVar[Rule] = Rule("lamb", states=MOMENTS, required=MOMENTS)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
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
        checks.check_eps(group)
        checks.check_betas(group)

    def _keys(self, group: dict[str, Any]) -> state.Keys:
        return state.keys_of(group, MOMENTS)

    def _numbers(self, group: dict[str, Any]) -> Numbers:
        beta1, beta2 = group["betas"]
        return Numbers(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )
