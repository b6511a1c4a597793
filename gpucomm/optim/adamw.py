"""AdamW, in one pass. I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gpucomm.optim.adam import Adam


class AdamW(Adam):
    """torch.optim.AdamW's arguments, groups and state: Adam with decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
            zero_grad_in_step=zero_grad_in_step,
        )

    def __setstate__(self, state_of: dict[str, Any]) -> None:
        super().__setstate__(state_of)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # also where Adam's state is loaded, as in torch
