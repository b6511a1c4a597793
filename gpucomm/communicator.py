"""Collectives on arrays in host memory and on GPUs, for programs that want more than a wrapped model."""

import operator
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gpucomm import _core, cuda
from gpucomm.errors import CommTimeout
from gpucomm.gpus import Gpus, Shrinking, connect
from gpucomm.nccl_options import NcclOptions
from gpucomm.transport import Transport, flat_tensor
from gpucomm.world import World, withdrawing

_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
)


class Communicator(_core.CommunicatorBase):
    """Collectives among the ranks of a process group. Construction is collective.

    `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast` and `barrier` take contiguous arrays: in host memory of
    torch, NumPy, anything with DLPack; with transport "nccl" also on the GPU that the program has chosen, of torch,
    CuPy, anything with DLPack or `__cuda_array_interface__`. Of those the operation is ordered with the program's
    current stream, as torch's are, and the host does not wait. Dtypes are float16, bfloat16, float32, float64, int32,
    int64, uint8 (complex as pairs).
    Every rank calls the same ones in the same order, from one thread at a time. With `async_op=True` they return a
    handle with `wait()` and `done()`; the arrays belong to the operation until then.

    NCCL adds in the array's dtype: 16-bit floats are rounded at each step, and integers wrap in their averages too (so
    an average of uint8 raises ValueError). Its "min" and "max" leave NaN out; elsewhere one rank's NaN is the result.

    Over shared memory, arrays from `empty` are reduced in place, several times faster than ordinary ones, which are
    copied through staging memory.

    Args:
        group: a torch.distributed process group; the default group if None.
        transport: "auto" (shared memory if every rank has it, else the group itself), "shm", "c10d", "nccl" (for arrays
            on GPUs, beside "auto" for those of the host), "loopback" (this process stands for all ranks), or a
            Transport.
        timeout: timedelta or seconds after which a wait raises CommTimeout naming the missing ranks; default: the
            group's.
        nccl_options: an NcclOptions, with transport "nccl". register_buffers is for DistributedDataParallel alone.

    Raises:
        TransportUnavailable: a transport asked for by name cannot serve this group; on every rank.
        ValueError: the transport or the timeout, in the argument or the environment, is none; peers get CommError.
        CommTimeout, PeerFailed: from the collectives; afterwards the communicator is dead.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        transport: str | Transport = "auto",
        timeout: timedelta | float | None = None,
        nccl_options: NcclOptions | None = None,
    ) -> None:
        with withdrawing(group):
            world = World.of(group, timeout, transport)
            if nccl_options is not None and world.transport != "nccl":
                raise ValueError(f"nccl_options beside transport={world.transport!r}, which is not NCCL's")
        self._origin: World | None = None
        self._connect(world, nccl_options)

    def _connect(self, world: World, options: NcclOptions | None, shrinking: Shrinking | None = None) -> None:
        exchange = world.meet()
        gpus = None
        if world.transport == "nccl":  # of the program's choice
            ordinal = cuda.gpu.current_device()
            gpus = connect(world, exchange, -1 if ordinal is None else ordinal, options, shrinking)
        self._join(world.connect(exchange), _core.InlineStream(), gpus)
        self._origin = world

    def _join(self, transport: _core.Transport, stream: _core.Stream, gpus: "Gpus | None" = None) -> None:
        super().__init__(transport, stream)
        self._gpus = gpus
        if gpus is not None:
            self._attach_gpu(gpus.transport, gpus.stream, gpus.current_stream, cuda.gpu.asks_driver)
        self._transport: _core.Transport | None = transport
        self.rank: int = transport.rank
        self.world_size: int = transport.size
        self.transport: str = transport.name() if gpus is None else gpus.transport.name()

    @classmethod
    def over(cls, transport: _core.Transport, stream: _core.Stream, gpus: "Gpus | None" = None) -> "Communicator":
        """One that shares a transport and its stream with somebody else: their operations come in one order.

        gpus: for arrays on them, in the same way.
        """
        communicator = cls.__new__(cls)
        communicator._origin = None
        communicator._join(transport, stream, gpus)
        return communicator

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that the transport reduces in place. Zero-filled; local, not collective."""
        if dtype not in _DTYPES:
            raise TypeError(f"dtype is {dtype}, accepted are {', '.join(str(d) for d in _DTYPES)}")
        if self._transport is None:
            raise RuntimeError("this communicator is closed")
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        if any(length < 0 for length in size):
            raise ValueError(f"shape is {tuple(size)}, accepted are lengths of 0 or more")
        memory = self._transport.allocate(size.numel() * dtype.itemsize)
        return flat_tensor(memory, dtype, size.numel()).view(size)

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Byte strings of any length from all ranks, in rank order. Two collectives, between the hosts."""
        with cuda.gpu.host():
            return self._gather_bytes(mine)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        source = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
        return [bytes(row.tolist()) for row in self.all_gather_uneven(source)]

    def all_gather_uneven(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """One-dimensional tensors of one dtype and any length from all ranks, in rank order. Two collectives."""
        with cuda.gpu.host():
            lengths = torch.empty(self.world_size, dtype=torch.int64)
            self.all_gather(lengths, torch.tensor([len(mine)]))
            by_rank = lengths.tolist()
        longest = max(by_rank)
        if longest == 0:
            return [mine] * self.world_size
        padded = mine.new_zeros(longest)
        padded[: len(mine)] = mine
        everything = mine.new_empty(self.world_size * longest)
        self.all_gather(everything, padded)
        rows = everything.view(self.world_size, longest)
        return [row[:length].clone() for row, length in zip(rows, by_rank, strict=True)]

    def shrink(self, exclude: Collection[int]) -> "Communicator":
        """A communicator of this one's ranks but those in `exclude`, for those that remain: collective among them.

        Also when this one failed because the others are gone; it stays as it is, close() it. Ranks keep their order.
        On GPUs NCCL makes it from this one's (ncclCommShrink, 2.27.3 and later) while that works, else anew.

        Raises ValueError for ranks that are none, for all of them, and for this rank; RuntimeError for a communicator
        that is closed or has no process group of its own; CommTimeout if those that remain do not all come to exclude
        the same ranks.
        """
        if self._origin is None or self._transport is None:
            raise RuntimeError("shrink: this communicator is closed, or part of a DistributedDataParallel")
        gone = self._ranks_in(exclude)
        if not isinstance(self._origin.transport, str):
            raise ValueError("shrink: a transport object serves one group only; make a communicator with another")
        stay = [rank for at, rank in enumerate(self._origin.global_ranks) if at not in gone]
        timeout = timedelta(seconds=self._origin.timeout_s)
        try:
            group = dist.new_group(stay, timeout, use_local_synchronization=True)
        except dist.DistStoreError as error:
            text = (
                f"shrink: not all of ranks {stay} came within {timeout.total_seconds():g} s, each to exclude the others"
            )
            raise CommTimeout(text, []) from error
        with withdrawing(group):
            world = World.of(group, timeout, self._origin.transport)
        made = Communicator.__new__(Communicator)
        options, shrinking = None, None
        if self._gpus is not None:
            options, shrinking = self._gpus.options, Shrinking(self._gpus, gone)
        made._connect(world, options, shrinking)
        return made

    def _ranks_in(self, exclude: Collection[int]) -> list[int]:
        """Sorted. Raises ValueError for what shrink() does not accept."""
        try:
            gone = sorted({operator.index(rank) for rank in exclude if not isinstance(rank, bool)})
            is_right = len(gone) == len(set(exclude)) > 0 and gone[0] >= 0 and gone[-1] < self.world_size
        except TypeError:
            is_right = False
        if not is_right or self.rank in gone:
            raise ValueError(
                f"shrink: exclude is {exclude!r}, accepted are ranks of 0 to {self.world_size - 1} but this one, "
                f"{self.rank}"
            )
        return gone

    def close(self) -> None:
        """Lets go of the transport; a peer that still waits for this rank gets PeerFailed. Idempotent."""
        self._transport = self._gpus = None
        self._release()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
