"""Before any optimizer of the process steps: it must not apply gradients that are not what all ranks agreed on.

A closure that the program gives runs inside the step, and makes the gradients there: it is followed by the same check.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpucomm import _core
from gpucomm.reduction.reducer import Reducer
from gpucomm.reduction.sharing import live_reducers


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """args: those of step(), the optimizer first. Returns both as step() is to get them; None: as they are."""
    if not live_reducers():
        return None
    _check_all(optimizer)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked(args[1], optimizer), *args[2:]), kwargs
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(closure, optimizer)}
    return None


def _checked(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    def checked() -> Any:
        loss = closure()
        _check_all(optimizer)
        return loss

    return checked


def _check_all(optimizer: torch.optim.Optimizer) -> None:
    for reducer in live_reducers():
        _check(reducer, optimizer)


def _check(reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError, CommError for gradients that are not complete; takes those away that are to be skipped."""
    # Communication hooks may step optimizers.
    unfinished = reducer.engine.mode == _core.Mode.REDUCE and reducer.comm_hooks is None
    if not (unfinished or reducer.failure or reducer.loop.announced or reducer.finite.skipping):
        return
    reducer.notice_abandoned_backward()
    # What another wrapper has taken over since (made anew after a failure) is that one's.
    names = {
        id(param): name
        for index, (param, name) in enumerate(zip(reducer.params, reducer.names, strict=True))
        if reducer.active or index in reducer.orphans
    }
    mine = [param for group in optimizer.param_groups for param in group["params"] if id(param) in names]
    if not mine:
        return
    if unfinished or reducer.failure:
        reducer.raise_failure()
        raise RuntimeError(
            "optimizer.step() before the gradients are reduced: inside backward, or after it raised. To step in "
            "backward, use torch's _apply_optimizer_in_backward or _register_fused_optim"
        )
    if reducer.finite.skipping:
        reducer.finite.take_skipped(mine)
    elif left := [param for param in mine if param.grad is not None]:
        raise RuntimeError(
            "optimizer.step() after reducer.prepare_for_backward(), but no backward was reduced since: parameter "
            f"'{names[id(left[0])]}' has a gradient of this rank alone. A backward that is split, as by the "
            "zero-bubble schedules of torch's pipelining or by torch.autograd.grad(), calls no gradient hooks"
        )


register_optimizer_step_pre_hook(_before_step)
