"""The gate: lines ranks up before each sample, by a mechanism that none of the arms uses.

A small shared file holds one monotone counter per rank, 128 bytes apart (one writer each). Waiting is a bounded run of
yields, then short sleeps: a rank that waits must not take the core of one that works, also with more ranks than cores.
Starting together this way costs every arm the same and none of them is asked to time itself with its own barrier.
"""

import mmap
import os
import time

_STRIDE = 16  # int64 words between two ranks' counters
_ARRIVED, _MARKED = 0, 1  # words used in a rank's line
_YIELDS_BEFORE_SLEEP = 200
_SLEEP_S = 20e-6


class Gate:
    """All ranks' counters, mapped from `path`, a zeroed file of at least `Gate.bytes_for(size)` bytes."""

    def __init__(self, path: str, rank: int, size: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.bytes_for(size))
        self._words = memoryview(self._map).cast("q")
        self._generation = 0
        self._parent = os.getppid()

    @staticmethod
    def bytes_for(size: int) -> int:
        return size * _STRIDE * 8

    def wait(self) -> None:
        """Blocks until every rank has called `wait` as often as this one. TimeoutError names the missing rank;
        RuntimeError once the process that started this one is gone: no rank outlives it."""
        self._generation += 1
        self._words[self.rank * _STRIDE + _ARRIVED] = self._generation
        for peer in range(self.size):
            word = peer * _STRIDE + _ARRIVED
            turns = 0
            while self._words[word] < self._generation:
                turns += 1
                if turns < _YIELDS_BEFORE_SLEEP:
                    os.sched_yield()
                    continue
                if turns == _YIELDS_BEFORE_SLEEP:
                    deadline = time.monotonic() + self.timeout_s
                time.sleep(_SLEEP_S)
                if os.getppid() != self._parent:
                    raise RuntimeError(f"rank {self.rank}: the process that started the ranks is gone")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {self.rank}: rank {peer} did not reach the gate in {self.timeout_s} s")

    def mark(self, value: int) -> None:
        """Publishes `value` for this rank; values must not fall."""
        self._words[self.rank * _STRIDE + _MARKED] = value

    def marks(self) -> list[int]:
        """The value that each rank published last, by rank."""
        return [self._words[rank * _STRIDE + _MARKED] for rank in range(self.size)]
