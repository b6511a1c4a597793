"""Gradients with a graph, as backward(create_graph=True) makes them: the reduced ones get one too.

The mean is linear, so what flows back into it is averaged over the ranks and goes on into each rank's own gradient.
That is a collective in the middle of a later backward, at whatever place autograd comes to it: no bucket may be
launched before the end of that backward, or ranks would start the two in different orders.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gpucomm.communicator import Communicator


class _Average(torch.autograd.Function):
    """Tensors of one layout on all ranks to `factor` times their means; collective, and so is its backward."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, factor: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.factor = comm, factor
        return tuple(_averages(comm, factor, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return (None, None, *_Average.apply(ctx.comm, ctx.factor, *grads))


class _Reduced(torch.autograd.Function):
    """Means that were reduced already, as a function of this rank's own gradients; only its backward is collective."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        factor: float,
        means: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        *own: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.factor = comm, factor
        return tuple(mean.clone() for mean in means)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return (None, None, None, None, *_Average.apply(ctx.comm, ctx.factor, *grads))


def with_graph(
    means: Sequence[torch.Tensor], own: Sequence[torch.Tensor], factor: float, comm: Communicator
) -> tuple[torch.Tensor, ...]:
    """The means, through which gradients flow back into what they were made of.

    means, own: of the same parameters on every rank; a rank without a gradient of its own gives zeros. factor: by which
    the mean over the ranks was multiplied.
    """
    # Every rank has the node in its graph, also one whose own gradients have none.
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        result: tuple[torch.Tensor, ...] = _Reduced.apply(comm, factor, means, anchor, *own)
    return result


def _averages(comm: Communicator, factor: float, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        members = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
        comm.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat, "avg")
        for i, part in zip(members, flat.mul_(factor).split([tensors[i].numel() for i in members]), strict=True):
            results[i] = part.view(tensors[i].shape)
    return results
