"""What `.grad` holds between two iterations, and who besides the parameter holds it."""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from threading import Thread

import torch

from gpucomm.reduction.layout.buckets import use_count
from gpucomm.reduction.layout.local import is_distributed


def kept_grads(params: Sequence[torch.nn.Parameter], first: int) -> list[int]:
    """Indices of the parameters whose `.grad` holds something, but for `first`."""
    return [i for i, p in enumerate(params) if i != first and p.grad is not None and _holds_something(p.grad)]


def _holds_something(grad: torch.Tensor) -> bool:
    return grad._nnz() > 0 if grad.layout == torch.sparse_coo else bool(grad.any())


def _count_grad_references() -> int:
    """References a tensor gains by being some parameter's `.grad`: differs between versions of torch."""
    param, grad = torch.nn.Parameter(torch.empty(1)), torch.empty(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


GRAD_REFERENCES = _count_grad_references()


# The next ones look at `.grad` without holding it: they count who does.


def _references_of_grad(param: torch.nn.Parameter) -> int:
    return sys.getrefcount(param.grad)


def _memory_of_grad(param: torch.nn.Parameter) -> int:
    """The address of its storage; 0 for what has none of its own."""
    grad = param.grad
    has_one = grad is not None and grad.layout == torch.strided and not is_distributed(grad)
    return grad.untyped_storage()._cdata if grad is not None and has_one else 0


def shared_grads(params: Sequence[torch.nn.Parameter], indices: Sequence[int], first: int) -> list[int]:
    """Those of the parameters whose `.grad` somebody else holds too, or a tensor in the same memory.

    That several of them lie in one memory does not count. first: whose hook is running, so that autograd may hold its
    gradient.
    """
    memory = {index: address for index in indices if (address := _memory_of_grad(params[index]))}
    inmates = Counter(memory.values())
    shared = set()
    for index, address in memory.items():
        uses = _LONE_USES - 1 + inmates[address] + (_autograds_uses() if index == first else 0)
        if _references_of_grad(params[index]) > _LONE_REFERENCES or use_count(address) > uses:
            shared.add(address)
    return [index for index, address in memory.items() if address in shared]


def _count_of_lone_grad() -> tuple[int, int]:
    param = torch.nn.Parameter(torch.empty(1))
    param.grad = torch.empty(1)
    return _references_of_grad(param), use_count(_memory_of_grad(param))


_LONE_REFERENCES, _LONE_USES = _count_of_lone_grad()


@cache
def _autograds_uses() -> int:
    """Uses of a gradient's memory that are autograd's own while the hook of its parameter runs, where it took the
    gradient as it was, at most: 2 with torch 2.6, 0 with 2.13.

    Found out in a backward on a thread of its own: where this is asked one is under way, and before the first one of
    the process none must run, for a process that is forked afterwards would inherit half an engine.
    """
    param = torch.nn.Parameter(torch.ones(1, 1))
    uses: list[int] = []
    param.register_post_accumulate_grad_hook(lambda p: uses.append(use_count(_memory_of_grad(p))))
    backward = Thread(target=lambda: torch.nn.functional.linear(torch.ones(1, 1), param).sum().backward())
    backward.start()
    backward.join()
    return uses[0] - _LONE_USES
