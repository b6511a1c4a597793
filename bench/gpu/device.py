"""The GPU as the parts see it: the real one, or in a dry run the stand-ins of tests/fake_cuda.

All that a dry run cannot run is in class Gpu, so it is kept small enough to be checked by eye. What gpucomm itself
needs of torch.cuda is in gpucomm/cuda.py; there the stand-in is put in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu.parts import NotRun
from gpu.place import Place


@dataclass(frozen=True)
class Memory:
    """peak_bytes: the most that torch's tensors took since forget_peak(); made: tensors since the process began.

    other_bytes: of the device, whoever has it, but what torch holds.
    """

    peak_bytes: int
    made: int
    other_bytes: int


class Gpu:
    """The first GPU, through torch.cuda."""

    dry_run = False
    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    torch_device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> Any:
        """A point of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, first: Any, last: Any) -> float:
        """Waits for the last."""
        last.synchronize()
        return first.elapsed_time(last) * 1e3

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Within it another stream is the current one; it comes after what was enqueued, and what follows after it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def captured(self, work: Callable[[], None]) -> tuple[Callable[[], None], int]:
        """A function that replays the work as a CUDA graph, and how often capturing has run it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay, 0

    def forget_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> Memory:
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        other_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
        return Memory(stats["allocated_bytes.all.peak"], stats["allocation.all.allocated"], other_bytes)

    def compiled(self, module: nn.Module) -> nn.Module:
        return torch.compile(module)

    def on_host(self) -> AbstractContextManager:
        """Within it tensors that are made without a device are the host's own."""
        from gpucomm import cuda

        return cuda.gpu.host()


class StandIn(Gpu):
    """CPU tensors stand for those of a GPU. Times are those of the host, and say nothing."""

    dry_run = True
    type = "cpu"
    backend = "gloo"
    torch_device = torch.device("cpu")

    def __init__(self, shim: Any) -> None:
        self._shim = shim

    def synchronize(self) -> None:
        self._shim.synchronize()

    def mark(self) -> Any:
        self._shim.synchronize()
        return time.perf_counter()

    def us_between(self, first: Any, last: Any) -> float:
        return (last - first) * 1e6

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        side, before = self._shim.program.stream("side"), self._shim.current
        self._shim.control.wait_stream(side, before)
        with self._shim.stream(side):
            yield
        self._shim.control.wait_stream(before, side)

    def captured(self, work: Callable[[], None]) -> tuple[Callable[[], None], int]:
        """Captured work runs when it is captured; a replay is the work itself."""
        with self.side_stream(), self._shim.control.capture(self._shim.current):
            work()
        return work, 1

    def forget_peak(self) -> None:
        pass

    def memory(self) -> Memory:
        calls = self._shim.control.calls
        return Memory(0, 0, calls("cuMemAlloc_v2") + calls("ncclMemAlloc"))

    def compiled(self, module: nn.Module) -> nn.Module:
        return torch.compile(module, backend="eager")


@contextmanager
def gpu_of(place: Place) -> Iterator[Gpu]:
    """The GPU of a rank, chosen as torch's current one. Raises NotRun if there is none."""
    if place.dry_run:
        from fake_cuda.ranks import on_gpu

        with on_gpu(0, 1) as shim:
            yield StandIn(shim)
        return
    if (missing := missing_gpu()) is not None:
        raise NotRun(missing)
    torch.cuda.set_device(Gpu.torch_device)
    yield Gpu()


def missing_gpu() -> str | None:
    """Why torch has no NVIDIA GPU here; None if it has."""
    if torch.version.cuda is None:
        return f"no GPU can be used: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"no GPU can be used: torch {torch.__version__} (CUDA {torch.version.cuda}) finds none, or no driver"
    return None
