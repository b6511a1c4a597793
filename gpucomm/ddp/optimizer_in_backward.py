"""Optimizers that step inside backward: torch's _apply_optimizer_in_backward, with gradients that are reduced first.

torch runs each parameter's optimizer from a gradient hook, on the local gradient. Wrapped, they step when the gradients
of the iteration are reduced, and take them away, as with torch's class, which does so on GPUs only.
"""

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel


def take_over(ddp: "DistributedDataParallel") -> None:
    """Moves the optimizers of the wrapper's parameters, if there are any, from their hooks to the end of backward."""
    params = [p for p in ddp._module_parameters if hasattr(p, "_in_backward_optimizers")]
    if not params:
        return
    # Here and not at the top: it compiles TorchScript when it is imported.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for param in params:
        for handle in param_to_optim_hook_handle_map.get(param, ()):
            handle.remove()
    _step_after_each_reduction(weakref.ref(ddp), params)


def _step_after_each_reduction(ddp: "weakref.ref[DistributedDataParallel]", params: list[torch.nn.Parameter]) -> None:
    def step() -> None:
        _step_after_each_reduction(ddp, params)
        for param in params:
            if param.grad is None:
                continue
            for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            param.grad = None

    if (wrapper := ddp()) is not None:
        wrapper._reduction.on_reduced.append(step)
