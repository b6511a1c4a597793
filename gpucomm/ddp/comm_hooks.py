"""What torch's class accepts as a communication hook, and its built-in ones."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gpucomm.reduction.layout.buckets import MIB

# As stock DDP plans without an argument: hooks get few and large buckets, each call of one costs Python and latency.
CAPS = (1 * MIB, 25 * MIB)


def check_hook(hook: Any) -> None:
    """Raises TypeError, ValueError with torch's words for what is not a hook(state, bucket) -> Future."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. It is {hook!r}.")
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ValueError(f"Communication hook: accepted is hook(state, bucket), it is {hook!r}{signature}.")
    if signature.parameters["bucket"].annotation not in (inspect.Parameter.empty, GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def builtin_hook(kind: Any) -> Callable | None:
    """The Python hook that does what a built-in one does; None for the all-reduce, which is what happens anyway."""
    if kind == BuiltinCommHookType.ALLREDUCE:
        return None
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    raise TypeError(f"comm_hook_type is {kind!r}, accepted are BuiltinCommHookType.ALLREDUCE and FP16_COMPRESS")
