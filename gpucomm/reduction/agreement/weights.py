"""How many samples or tokens this rank's gradients of the current iteration stand for."""

import math
from numbers import Real

import torch


class Weight:
    """The sum over the micro-batches of an iteration; None where the program gave none."""

    def __init__(self) -> None:
        self.total: float | None = None

    def add(self, count: Real | float | torch.Tensor) -> None:
        """count: a number, or a tensor of one element. Raises TypeError, ValueError for what is not a count."""
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.item()
        if isinstance(count, bool) or not isinstance(count, Real):
            raise TypeError(f"weight is {count!r}, accepted is a number of samples or tokens")
        if not 0 <= float(count) < math.inf:
            raise ValueError(f"weight is {count!r}, accepted is a number of samples or tokens, 0 or more")
        self.total = (self.total or 0.0) + float(count)

    def clear(self) -> None:
        self.total = None
