"""Gradients that could not go through their slot: reduced on their own after the buckets, in the same iteration.

A second gradient of a parameter whose slot was already packed, or one of a parameter without a fitting slot (unfrozen,
replaced, of another dtype). The reduction is linear, so adding the two parts is exact.
"""

import pickle
from typing import TYPE_CHECKING

import torch

from gpucomm.errors import StepFailed

if TYPE_CHECKING:
    from gpucomm.reducer import Reducer


class SecondRound:
    """What this rank has for the second round of an iteration, and the round itself."""

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer = reducer
        self._grads: dict[int, torch.Tensor] = {}

    def add(self, parameter: int, grad: torch.Tensor) -> None:
        """grad: this rank's contribution; taken over, the caller lets go of it."""
        kept = self._grads.get(parameter)
        self._grads[parameter] = grad.detach().clone() if kept is None else kept + grad.detach()

    def clear(self) -> None:
        self._grads.clear()

    def run(self, parameters: list[int]) -> None:
        """Reduces the union of what all ranks asked for; collective, after the buckets are reduced.

        Adds the mean to the slot's view where the parameter has one that fits, else leaves it as its `.grad`.
        Raises StepFailed on every rank if a parameter's shape or dtype differs between ranks.
        """
        reducer = self._reducer
        layout = [(tuple(reducer.params[i].shape), reducer.params[i].dtype) for i in parameters]
        self._check_layout(parameters, layout)
        for dtype in sorted({dtype for _, dtype in layout}, key=str):
            members = [i for i, (_, d) in zip(parameters, layout, strict=True) if d == dtype]
            parts = [self._grads.get(i, torch.zeros(reducer.params[i].shape, dtype=dtype)) for i in members]
            flat = torch.cat([part.to(dtype).reshape(-1) for part in parts])
            reducer.comm.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat, "avg")
            for i, mean in zip(members, flat.split([part.numel() for part in parts]), strict=True):
                self._unpack(i, mean.view(reducer.params[i].shape))

    def _unpack(self, parameter: int, mean: torch.Tensor) -> None:
        param, view = self._reducer.params[parameter], self._reducer._views[parameter]
        if view is not None and view.shape == mean.shape and view.dtype == mean.dtype:
            view.add_(mean)
        elif view is not None:
            # The slot (of another dtype or shape) cannot be the gradient; its zeros stay behind.
            self._reducer._views[parameter] = mean.clone()
        else:
            param.grad = mean.clone()

    def _check_layout(self, parameters: list[int], layout: list) -> None:
        everything = [pickle.loads(text) for text in self._reducer.comm.all_gather_bytes(pickle.dumps(layout))]
        for rank, theirs in enumerate(everything):
            for i, a, b in zip(parameters, everything[0], theirs, strict=True):
                if a != b:
                    name = self._reducer.transport.global_rank
                    raise StepFailed(
                        f"parameter '{self._reducer.names[i]}' is {a[1]} {list(a[0])} on rank {name(0)} and "
                        f"{b[1]} {list(b[0])} on rank {name(rank)}"
                    )
