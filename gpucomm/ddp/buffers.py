"""Buffers of a wrapped module: brought to one rank's values, or handed to the hook that the program registered."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gpucomm.ddp.replicas import broadcast_tensors

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel


def sync(ddp: "DistributedDataParallel", root: int) -> None:
    """Gives every rank the buffers of rank `root`, or calls the hook; collective. Version counters stay.

    A hook gets its state and the buffers by name. It returns None or a list of futures, which are waited for when the
    next reduced backward ends, at the latest before the next forward.
    """
    hook = getattr(ddp, "buffer_hook", None)
    if hook is None:
        broadcast_tensors(ddp.modules_buffers, ddp._comm, root)
        ddp._audit.note_equal_buffers(ddp, ddp._reduction.engine.iteration)
        return
    with torch.no_grad(), ExitStack() as kept:
        for buffer in ddp.modules_buffers:
            kept.enter_context(_unsafe_preserve_version_counter(buffer))
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, ddp.named_module_buffers)
    if futures is not None:
        ddp.reducer._install_post_backward_futures(futures)
