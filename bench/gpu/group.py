"""The process group of a part's ranks, and what they tell each other beside it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu.device import Gpu, gpu_of
from gpu.place import Place

_START_S = 60


@dataclass(frozen=True)
class Ranks:
    """Of one part, in a process group over gloo and, with a GPU, NCCL."""

    gpu: Gpu
    store: dist.Store
    rank: int
    size: int

    def everybody(self, key: str, value: Any, ranks: list[int] | None = None) -> list[Any]:
        """What each of the ranks (all of them by default) gives under this key, by rank; through the store."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in ranks or range(self.size)]


@contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """The ranks of a part, each with the GPU."""
    store = _store(place)
    with gpu_of(place) as gpu:
        timeout = timedelta(seconds=place.left_s)
        dist.init_process_group(gpu.backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
        torch.manual_seed(0)
        yield Ranks(gpu, store, place.rank, place.size)


def leave_together(ranks: Ranks, among: list[int] | None = None) -> None:
    """Nobody goes while a peer may still need it."""
    ranks.everybody("done", True, among)
    if ranks.rank == 0:
        time.sleep(0.2)  # it serves the store


def _store(place: Place) -> dist.Store:
    """Rank 0 serves it, at a port that it writes down for the others."""
    note, timeout = place.folder / "port", timedelta(seconds=_START_S)
    if place.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        (place.folder / "port.new").write_text(str(store.port))
        (place.folder / "port.new").rename(note)
        return store
    deadline = time.monotonic() + _START_S
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not serve its store within {_START_S} s")
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(note.read_text()), is_master=False, timeout=timeout)
