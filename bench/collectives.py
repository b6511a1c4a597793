"""The arms of bench_transport: one class per communication library, each with the same six methods.

Sizes are whole arrays, as in nccl-tests: the input of reduce_scatter, the output of all_gather, the array of the
others.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


class Ours:
    """gpucomm.Communicator, on tensors of its own arena (`arena`) or on ordinary ones, which go through staging."""

    def __init__(self, comm, arena: bool):
        self.name = "ours" if arena else "ours_plain"
        self._comm, self._arena = comm, arena
        self.library = f"gpucomm {comm.transport}"

    def empty(self, numel: int) -> torch.Tensor:
        return self._comm.empty((numel,), torch.float32) if self._arena else torch.empty(numel)

    def op(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
        """The operation as a call without arguments; `part` is this rank's share, of numel whole.numel() / P."""
        comm = self._comm
        return {
            "all_reduce": partial(comm.all_reduce, whole),
            "reduce_scatter": partial(comm.reduce_scatter, part, whole),
            "all_gather": partial(comm.all_gather, whole, part),
            "broadcast": partial(comm.broadcast, whole, 0),
            "barrier": comm.barrier,
        }[name]

    def close(self) -> None:
        """Ends the communicator, for both arms that share it."""
        self._comm.close()


class Gloo:
    """torch.distributed's default group."""

    name = "gloo"
    library = "torch.distributed gloo"

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel)

    def op(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
        # New names since torch 2.13; the old ones warn there on every call, which would be timed.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return {
            "all_reduce": partial(dist.all_reduce, whole),
            "reduce_scatter": partial(reduce_scatter, part, whole),
            "all_gather": partial(all_gather, whole, part),
            "broadcast": partial(dist.broadcast, whole, 0),
            "barrier": dist.barrier,
        }[name]


class Mpi:
    """The MPI library that mpi4py was started with, on NumPy views of ordinary tensors."""

    name = "mpi"

    def __init__(self):
        from mpi4py import MPI

        self._in_place, self._comm = MPI.IN_PLACE, MPI.COMM_WORLD
        self.library = MPI.Get_library_version().split(",")[0]

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel)

    def op(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
        comm, array, share = self._comm, whole.numpy(), part.numpy()
        return {
            "all_reduce": partial(comm.Allreduce, self._in_place, array),
            "reduce_scatter": partial(comm.Reduce_scatter_block, array, share),
            "all_gather": partial(comm.Allgather, share, array),
            "broadcast": partial(comm.Bcast, array, 0),
            "barrier": comm.Barrier,
        }[name]
