"""Distributed parameters (torch's DTensor): what of them and of their gradients this rank itself holds.

Tensor parallel splits a parameter, or repeats it, over one dimension of a device mesh; its gradients are reduced over
another. Of both, only local tensors are looked at: the slot of a parameter is like its local tensor, and the gradient
that is installed is a distributed tensor around the view of the slot, placed as the parameter is.
"""

import sys
from typing import Any

import torch

from gpucomm import _core, cuda


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor. Does not import what no program without one needs."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, in the same memory; any other tensor is its own."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return _as_distributed(tensor).to_local()


def local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of `param.grad`, placed as the parameter is; None if it has none.

    Autograd places a gradient as the operation gives it, often as partial sums. Then this is a collective of the
    parameter's own mesh, whose ranks run the same graph and so come here in the same order.
    """
    grad = param.grad
    if grad is None or not is_distributed(grad) or not is_distributed(param):
        return grad
    placements = _as_distributed(param).placements
    with torch.no_grad():
        if _as_distributed(grad).placements != placements:
            grad = _as_distributed(grad).redistribute(placements=placements)
    return local_of(grad)


def placed_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `local` that can be the parameter's `.grad`: `local` itself for a plain one."""
    if not is_distributed(param):
        return local
    like = _as_distributed(param)
    with torch.no_grad():
        return type(like).from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def checksum(tensor: torch.Tensor) -> int:
    """Over its bytes in the order of its elements' indices. Of one on a GPU the host waits for a copy."""
    return _core.checksum(cuda.on_host(as_bytes(tensor)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of their indices, flat; a view of a contiguous tensor."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


class DistributedGrad:
    """A gradient around the view of a slot: made once for the slot, installed iteration after iteration."""

    def __init__(self, param: torch.Tensor, view: torch.Tensor) -> None:
        # Not of the view itself: torch would hold it as the base of what is made of it.
        local = torch.empty(0, dtype=view.dtype)
        local.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        self.tensor = placed_like(param, local)
        self._address = view.data_ptr()
        self._ours = (0, 0)

    def count_references(self) -> None:
        """All that hold it now are ours."""
        self._ours = self._references()

    def is_kept(self, param: torch.Tensor, grad_references: int) -> bool:
        """Whether it cannot take the next gradient: somebody besides `.grad` holds it, or it was moved to other memory.

        grad_references: how many references a tensor gains by being a `.grad`.
        """
        if local_of(self.tensor).data_ptr() != self._address:
            return True
        outer, inner = self._references()
        is_grad = param.grad is self.tensor
        return outer > self._ours[0] + (grad_references if is_grad else 0) or inner > self._ours[1]

    def _references(self) -> tuple[int, int]:
        """To the distributed tensor, and to the local one in it."""
        return sys.getrefcount(self.tensor), sys.getrefcount(local_of(self.tensor))


def _as_distributed(tensor: torch.Tensor) -> Any:
    return tensor
