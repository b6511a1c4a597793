"""Where the next batch comes from, and how a resumed run finds its place again.

Two kinds of source. A *callable* maps a position (0, 1, 2, ...) to a batch: its place is one integer. An *iterable*
(a DataLoader) is gone through again and again: its place is the epoch, the offset in it, and the state that the random
generators had when the epoch began, since a shuffling loader draws its order from them at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch


class Feed(Protocol):
    """Draws batches one after the other; `place` and `seek` make the sequence resumable."""

    def draw(self) -> Any: ...

    def place(self) -> dict[str, Any]: ...

    def seek(self, place: dict[str, Any]) -> None: ...


def feed_from(batches: Callable[[int], Any] | Iterable[Any]) -> Feed:
    """The feed that fits `batches`; TypeError if it is neither callable nor iterable more than once."""
    if isinstance(batches, Iterator):
        raise TypeError(f"batches: a one-way iterator cannot be resumed, give the iterable itself; got {batches!r}")
    if isinstance(batches, Iterable):
        return IterableFeed(batches)
    if callable(batches):
        return CallableFeed(batches)
    raise TypeError(f"batches: expected an iterable or a callable from position to batch, got {batches!r}")


class CallableFeed:
    """Batches computed from their position."""

    def __init__(self, batch_at: Callable[[int], Any]) -> None:
        self._batch_at = batch_at
        self._position = 0

    def draw(self) -> Any:
        batch = self._batch_at(self._position)
        self._position += 1
        return batch

    def place(self) -> dict[str, Any]:
        return {"position": self._position}

    def seek(self, place: dict[str, Any]) -> None:
        self._position = int(place["position"])


class IterableFeed:
    """Epoch after epoch of an iterable, telling a DistributedSampler which epoch it is."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._generator = getattr(iterable, "generator", None)  # a DataLoader's own, if it was given one
        self._epoch = -1
        self._offset = 0
        self._iterator: Iterator[Any] = iter(())
        self._states_at_epoch_start: list[torch.Tensor] = []

    def draw(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._start_epoch(self._epoch + 1)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise ValueError("batches: the iterable is empty") from None
        self._offset += 1
        return batch

    def place(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "offset": self._offset, "generators": self._states_at_epoch_start}

    def seek(self, place: dict[str, Any]) -> None:
        """Replays the epoch up to the offset. Moves the global generator: restore that afterwards."""
        if place["epoch"] < 0:
            return
        torch.set_rng_state(place["generators"][0])
        if self._generator is not None:
            self._generator.set_state(place["generators"][1])
        self._start_epoch(place["epoch"])
        for _ in range(place["offset"]):
            self.draw()

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._offset = epoch, 0
        self._states_at_epoch_start = [torch.get_rng_state()]
        if self._generator is not None:
            self._states_at_epoch_start.append(self._generator.get_state())
        set_epoch = getattr(getattr(self._iterable, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        self._iterator = iter(self._iterable)
