"""Transports that are written in Python: the base for your own, and the one over any torch.distributed group."""

import ctypes
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpucomm import _core
from gpucomm.errors import CommError, CommTimeout, PeerFailed

# How often a wait looks at the clock and lets signals through.
_SLICE = timedelta(milliseconds=200)
# How long a rank that found the group broken waits for its peers to say that they are still there.
_ROLL_CALL_S = 1.0


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}


class Handle(Protocol):
    """An operation in flight: what torch.distributed returns with async_op=True, or anything alike."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Transport(_core.Transport):
    """Base for transports in Python. Subclasses define `name` and the collectives.

    Each collective gets host tensors (flat, contiguous; views of memory that stays alive and untouched until the handle
    completes), starts the operation without blocking and returns a Handle. Every rank calls the same ones in the same
    order. Buckets are plain host memory; op: "sum", "min", "max" or "prod".
    """

    @abstractmethod
    def name(self) -> str: ...
    @abstractmethod
    def all_reduce(self, x: torch.Tensor, op: str) -> Handle: ...
    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str) -> Handle: ...
    @abstractmethod
    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Handle: ...
    @abstractmethod
    def broadcast(self, x: torch.Tensor, root: int) -> Handle: ...
    @abstractmethod
    def barrier(self) -> Handle: ...

    def start(self, collective: _core.Collective) -> Handle:
        """Called by the engine. An average becomes a sum of scaled contributions; of integers, a divided sum."""
        kind, numel, size = collective.kind, collective.numel, self.size
        if kind == "barrier":
            return self.barrier()
        dtype = getattr(torch, collective.dtype)
        inputs, outputs = {"reduce_scatter": (size, 1), "all_gather": (1, size)}.get(kind, (1, 1))
        source = tensor_at(collective.input_address, numel * inputs, dtype)
        output = tensor_at(collective.output_address, numel * outputs, dtype)
        if kind == "broadcast":
            return self.broadcast(output, collective.root)
        if kind == "all_gather":
            return self.all_gather(output, source)
        average = collective.op == "avg"
        op = "sum" if average else collective.op
        wide = dtype
        if dtype in (torch.float16, torch.bfloat16):
            wide = torch.float32  # added in fp32, rounded once
        elif average and not dtype.is_floating_point:
            wide = torch.int64
        # The group reduces in place; what all_reduce is given is its result too, but an input stays as it is.
        result = source.to(wide, copy=kind == "reduce_scatter")
        if average and dtype.is_floating_point:
            result.mul_(1.0 / size)
        if kind == "all_reduce":
            part, handle = result, self.all_reduce(result, op)
        else:
            part = torch.empty(numel, dtype=result.dtype)
            handle = self.reduce_scatter(part, result, op)

        def unpack() -> None:
            if average and not dtype.is_floating_point:
                part.copy_(torch.div(part, size, rounding_mode="trunc"))
            if part.data_ptr() != output.data_ptr():
                output.copy_(part)

        return _Then(handle, unpack)


class C10dTransport(Transport):
    """Over any torch.distributed process group with a CPU backend: gloo between hosts, MPI, vendors' own.

    timeout_s: how long a wait lasts before CommTimeout. Which rank is missing is found out by a roll call through the
    group's store. Raises TypeError for a group that is not a ProcessGroup.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        global_ranks = dist.get_process_group_ranks(group)
        super().__init__(dist.get_rank(group), dist.get_world_size(group), global_ranks)
        self.group = group
        self.timeout_s = timeout_s
        self._global_ranks = global_ranks
        self._failure: CommError | None = None
        self._started = 0

    def name(self) -> str:
        return "c10d"

    # The group's own methods: those of torch.distributed add a log record and a warning about names to each call.

    def all_reduce(self, x: torch.Tensor, op: str) -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]  # type: ignore[assignment]
        return self._start("all_reduce", lambda: self.group.allreduce([x], options))

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str) -> Handle:
        # gloo has no reduce_scatter for every op: all of it is reduced, the own part kept.
        part = source[self.rank * output.numel() : (self.rank + 1) * output.numel()]
        return _Then(self.all_reduce(source, op), lambda: output.copy_(part))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Handle:
        return self._start("all_gather", lambda: self.group._allgather_base(output, source))

    def broadcast(self, x: torch.Tensor, root: int) -> Handle:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", lambda: self.group.broadcast([x], options))

    def barrier(self) -> Handle:
        nothing = torch.zeros(1)
        return self._start("barrier", lambda: self.group.allreduce([nothing]))

    def abort(self, reason: str) -> None:
        """Peers learn of it by the roll call; the group itself belongs to its maker and is left alone."""
        self._answer_roll_call(f"gave up: {reason}")
        self._failure = self._failure or CommError(f"this rank gave up: {reason}")

    def _start(self, what: str, operation: Callable[[], dist.Work]) -> Handle:
        if self._failure is not None:
            raise self._failure
        self._started += 1
        try:
            work = operation()
        except RuntimeError as error:
            raise self._broken(what, str(error)) from error
        return _C10dWork(self, what, work)

    def _wait(self, what: str, work: dist.Work) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                # Neither complete nor failed: only this slice of the wait is over.
                if work.is_completed() or work.exception() is not None:
                    raise self._broken(what, str(error)) from error
            if time.monotonic() > deadline:
                raise self._timed_out(what)

    def _timed_out(self, what: str) -> CommError:
        here, _ = self._roll_call(what)
        missing = [self._global_ranks[r] for r in range(self.size) if r not in here] or self._others()
        text = f"{what} #{self._started}: rank(s) {missing} did not come within {self.timeout_s:g} s"
        self._failure = CommTimeout(text, missing)
        return self._failure

    def _broken(self, what: str, reason: str) -> CommError:
        here, said = self._roll_call(what)
        for rank, words in said.items():
            if words.startswith("gave up") and rank != self.rank:
                self._failure = self._peer_failed(rank, words)
                return self._failure
        gone = [r for r in range(self.size) if r not in here]
        if gone:
            self._failure = self._peer_failed(gone[0], f"no sign of life; {what} ended with: {reason}")
        else:
            self._failure = CommError(f"{what} #{self._started} failed on every rank: {reason}")
        return self._failure

    def _peer_failed(self, rank: int, reason: str) -> PeerFailed:
        global_rank = self._global_ranks[rank]
        return PeerFailed(f"rank {global_rank} failed: {reason}", global_rank, reason)

    def _others(self) -> list[int]:
        return [self._global_ranks[r] for r in range(self.size) if r != self.rank]

    def _answer_roll_call(self, words: str) -> Any:
        store = distributed_c10d._get_process_group_store(self.group)
        try:
            store.set(f"gpucomm/roll_call/{self.group.group_name}/{self.rank}", words)
        except (RuntimeError, dist.DistError):
            return None  # the store went with its host
        return store

    def _roll_call(self, what: str) -> tuple[set[int], dict[int, str]]:
        """Says "here" and looks who else does. Returns the ranks that did and what they said."""
        here: set[int] = {self.rank}
        said: dict[int, str] = {}
        store = self._answer_roll_call(f"waiting in {what} #{self._started}")
        if store is None:
            return here, said
        deadline = time.monotonic() + _ROLL_CALL_S
        while len(here) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - here:
                key = f"gpucomm/roll_call/{self.group.group_name}/{rank}"
                try:
                    if store.check([key]):
                        said[rank] = store.get(key).decode()
                        here.add(rank)
                except (RuntimeError, dist.DistError):
                    return here, said
            time.sleep(0.02)
        return here, said


class _C10dWork:
    def __init__(self, transport: C10dTransport, what: str, work: dist.Work) -> None:
        self._transport = transport
        self._what = what
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._transport._wait(self._what, self._work)


class _Then:
    """A handle with something left to do on this rank once the operation is complete; done once."""

    def __init__(self, handle: Handle, then: Callable[[], object]) -> None:
        self._handle = handle
        self._then: Callable[[], object] | None = then

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def wait(self) -> None:
        self._handle.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over host memory that somebody else owns and keeps alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=numel)


def flat_tensor(memory: _core.Memory, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A flat tensor over a transport's memory, which lives as long as the tensor does."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel)
