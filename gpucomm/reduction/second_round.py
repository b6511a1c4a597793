"""Gradients that could not go through their slot: reduced on their own after the buckets, in the same iteration.

A second gradient of a parameter whose slot was already packed, or one of a parameter without a fitting slot (unfrozen,
replaced, of another dtype). The reduction is linear, so adding the two parts is exact.
"""

import pickle
from typing import TYPE_CHECKING

import torch

from gpucomm.errors import StepFailed
from gpucomm.reduction.local import local_of

if TYPE_CHECKING:
    from gpucomm.reduction.reducer import Reducer


class SecondRound:
    """What this rank has for the second round of an iteration, and the round itself."""

    def __init__(self) -> None:
        self._grads: dict[int, torch.Tensor] = {}

    def add(self, parameter: int, grad: torch.Tensor) -> None:
        """grad: this rank's contribution; taken over, the caller lets go of it."""
        kept = self._grads.get(parameter)
        self._grads[parameter] = grad.detach().clone() if kept is None else kept + grad.detach()

    def clear(self) -> None:
        self._grads.clear()

    def run(self, reducer: "Reducer", parameters: list[int]) -> None:
        """Reduces the union of what all ranks asked for; collective, after the buckets are reduced.

        The reducer adds the means to what it reduced.
        Raises StepFailed on every rank if a parameter's shape or dtype differs between ranks.
        """
        held = {i: local_of(reducer.params[i]) for i in parameters}
        layout = [(tuple(local.shape), local.dtype) for local in held.values()]
        _check_layout(reducer, parameters, layout)
        for dtype in sorted({dtype for _, dtype in layout}, key=str):
            members = [i for i, (_, d) in zip(parameters, layout, strict=True) if d == dtype]
            parts = [self._grads.get(i, torch.zeros(held[i].shape, dtype=dtype)) for i in members]
            flat = torch.cat([part.to(dtype).reshape(-1) for part in parts])
            reducer.comm.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat, "avg")
            for i, mean in zip(members, flat.split([part.numel() for part in parts]), strict=True):
                reducer.add_mean(i, mean.view(held[i].shape))


def _check_layout(reducer: "Reducer", parameters: list[int], layout: list) -> None:
    everything = [pickle.loads(text) for text in reducer.comm.all_gather_bytes(pickle.dumps(layout))]
    for rank, theirs in enumerate(everything):
        for i, a, b in zip(parameters, everything[0], theirs, strict=True):
            if a != b:
                name = reducer.transport.global_rank
                raise StepFailed(
                    f"parameter '{reducer.names[i]}' is {a[1]} {list(a[0])} on rank {name(0)} and "
                    f"{b[1]} {list(b[0])} on rank {name(rank)}"
                )
