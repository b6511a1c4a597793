"""On which stream autograd runs a node: as on CUDA, on the one that was current when its forward ran.

Torch's engine switches streams for CUDA nodes alone, so for the CPU tensors that stand for CUDA ones it is done here:

- a node of backward runs on the stream of its forward, known by its sequence number; an AccumulateGrad, which has none,
  and its hooks, on the stream of the node before it, which made the gradient;
- a node that takes a gradient which another stream made waits for that stream, the first one for the caller's;
- at the end of backward, the caller's stream waits for all of them, before callbacks that are queued later run.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import torch

_ACCUMULATES = 2**64 - 1  # the sequence number of every AccumulateGrad


class AutogradStreams:
    """Of one thread. wait_stream(then, first) makes a stream wait for another."""

    def __init__(self, wait_stream: Callable[[int, int], object]) -> None:
        self._wait_stream = wait_stream
        self._numbers = [0]  # nodes from this number on ...
        self._streams = [0]  # ... had their forward on this stream
        self._graph_task = -1
        self._last = 0  # the stream of the last node that ran
        self._made_on: dict[int, int] = {}  # gradients of this backward, by the storage's address

    def switch(self, handle: int) -> None:
        """Another stream is current, from the next op of the forward on."""
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._streams.append(handle)

    def current(self) -> int | None:
        """The stream of the node that runs; None: none does."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number = node._sequence_nr()
        if number == _ACCUMULATES:
            return self._last
        return self._streams[bisect.bisect_right(self._numbers, number) - 1]

    def before_op(self, handle: int, caller: int, storages: Iterable[int]) -> set[int]:
        """An op of a node is about to run; the storages, by their addresses, that it takes from other streams."""
        storages = set(storages)
        if self._graph_task != torch._C._current_graph_task_id():
            self._begin(caller)
            self._made_on = dict.fromkeys(storages, caller)
        self._last = handle
        taken = {storage for storage in storages if self._made_on.get(storage, handle) != handle}
        for first in {self._made_on[storage] for storage in taken}:
            self._wait_stream(handle, first)
        return taken

    def after_op(self, handle: int, storages: Iterable[int]) -> None:
        """It has written these."""
        self._made_on.update(dict.fromkeys(storages, handle))

    def _begin(self, caller: int) -> None:
        self._graph_task = torch._C._current_graph_task_id()
        self._made_on.clear()

        def finish() -> None:
            for first in set(self._made_on.values()) - {caller}:
                self._wait_stream(caller, first)
            self._made_on.clear()
            self._graph_task = -1

        torch.autograd.Variable._execution_engine.queue_callback(finish)
