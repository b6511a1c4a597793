"""Adam, in one pass. D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", 2014; AMSGrad: S. J. Reddi,
S. Kale, S. Kumar, "On the Convergence of Adam and Beyond", 2018."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from gpucomm.optim import checks, state
from gpucomm.optim.fused import FusedOptimizer, Numbers, Rule

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(FusedOptimizer):
    """torch.optim.Adam's arguments, groups and state; see FusedOptimizer for the last four.

    weight_decay is added to the gradient (L2), or with decoupled_weight_decay=True taken from the parameter. `foreach`,
    `fused` and `capturable` are accepted and change nothing but what GradScaler does (fused=True: the step unscales).
    Raises ValueError for options out of range, RuntimeError for differentiable=True.
    """

    rule: ClassVar[Rule] = Rule("adam", states=(*MOMENTS, "max_exp_avg_sq"), required=MOMENTS)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
        return state.keys_of(group, self.rule.states if group["amsgrad"] else MOMENTS)

    def _numbers(self, group: dict[str, Any]) -> Numbers:
        beta1, beta2 = group["betas"]
        return Numbers(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
        )
