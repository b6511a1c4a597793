"""How many samples or tokens this rank's gradients of the current iteration stand for."""

import math
from collections.abc import Sequence
from numbers import Real

import torch

from gpucomm import _core
from gpucomm.reduction.layout.grads import kept_grads


class Weight:
    """The sum over the micro-batches of an iteration; None where the program gave none."""

    def __init__(self) -> None:
        self.total: float | None = None
        self._micro_batches = 0
        self._last = 0.0
        self._kept: list[int] = []

    def add(self, count: Real | float | torch.Tensor) -> None:
        """count: a number, or a tensor of one element. Raises TypeError, ValueError for what is not a count."""
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.item()
        if isinstance(count, bool) or not isinstance(count, Real):
            raise TypeError(f"weight is {count!r}, accepted is a number of samples or tokens")
        if not 0 <= float(count) < math.inf:
            raise ValueError(f"weight is {count!r}, accepted is a number of samples or tokens, 0 or more")
        self._last = float(count)
        self.total = (self.total or 0.0) + self._last
        self._micro_batches += 1

    def take_back(self, count: Real | float | torch.Tensor) -> None:
        """Of a micro-batch that gave no gradients after all."""
        self._micro_batches -= 1
        self.total = (self.total or 0.0) - float(count) if self._micro_batches > 0 else None

    def begin_again(self) -> None:
        """The program dropped the gradients of all micro-batches but the one that is under way."""
        self.total, self._micro_batches = self._last, 1

    def clear(self) -> None:
        self.total = None
        self._micro_batches = 0
        self._kept = []

    # ---- what `.grad` holds from an iteration before is a mean already, and would be divided once more

    def note_kept(self, params: Sequence[torch.nn.Parameter], first: int) -> None:
        """When the iteration's first backward begins. first: whose gradient came already, so that it cannot be told."""
        if self.total is not None:
            self._kept = kept_grads(params, first)

    def fault(self, names: Sequence[str], engine: _core.Engine) -> RuntimeError | None:
        """When the reduced backward ended: why the iteration's gradients cannot be weighted."""
        added_to = [names[index] for index in self._kept if engine.used(index)]
        if not added_to:
            return None
        return RuntimeError(
            f"the gradient of parameter '{added_to[0]}' was added to one that an iteration before had left in .grad: "
            "with weight(), call zero_grad() after each backward that is reduced, and no_sync() for those before it"
        )
