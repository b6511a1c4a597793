"""Data with a closed-form result: unique per rank and index, exact in float32 however often it is summed in place.

Element i on rank r is (1 + (7 i + 13 r) mod 61) / 2**100: small integers, so that sums are exact, far from
overflow, so that a loop of in-place sums (each multiplies by P) stays exact for P a power of two until about
2**120; the period is a prime, so that a shift by any power of two is noticed.
"""

import math

import torch

_PERIOD = 61
_REPEATS = 64  # the row that is compared and copied at once; long enough for vector code
_SCALE = 2.0**-100
UNTOUCHED = -1.0  # what outputs hold before the operation; no result is negative


def row(rank: int, offset: int = 0) -> torch.Tensor:
    """Rank `rank`'s elements from index `offset` on, over some whole periods."""
    index = torch.arange(offset, offset + _PERIOD * _REPEATS)
    return (1 + (7 * index + 13 * rank) % _PERIOD).float() * _SCALE


def summed_row(size: int, offset: int = 0, sums: int = 1) -> torch.Tensor:
    """The elements after `sums` in-place sums over `size` ranks."""
    total = torch.stack([row(rank, offset).double() for rank in range(size)]).sum(0)
    return (total * float(size) ** (sums - 1)).float()


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def max_sums(size: int) -> int:
    """How many in-place sums over `size` ranks stay exact."""
    if size == 1:
        return 1 << 20
    if is_power_of_two(size):
        return int(200 / math.log2(size))
    return max(1, int(math.log(2**24 / (_PERIOD * size), size)))


def take_back(array: torch.Tensor, size: int, sums: int) -> None:
    """Undoes `sums` in-place sums over `size` ranks after at least one more; exact for P a power of two."""
    half = sums // 2  # a float32 would not hold the whole factor
    array.mul_(float(size) ** -half).mul_(float(size) ** (half - sums))


def fill(array: torch.Tensor, elements: torch.Tensor) -> None:
    """Repeats `elements` (one row) over the whole of `array`."""
    whole = array.numel() // elements.numel() * elements.numel()
    array[:whole].view(-1, elements.numel()).copy_(elements)
    array[whole:].copy_(elements[: array.numel() - whole])


def count_wrong(array: torch.Tensor, elements: torch.Tensor) -> int:
    """The number of elements of `array` that differ from `elements` repeated; NaN counts."""
    whole = array.numel() // elements.numel() * elements.numel()
    body = array[:whole].view(-1, elements.numel()) != elements
    tail = array[whole:] != elements[: array.numel() - whole]
    return int(body.sum()) + int(tail.sum())
