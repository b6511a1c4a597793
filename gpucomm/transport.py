"""Transports that are written in Python: the base for your own, and the one over any torch.distributed group."""

import ctypes
import os
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpucomm import _core, cuda
from gpucomm.errors import CommError, CommTimeout, PeerFailed, dead_since

# How often a wait looks at the clock and lets signals through.
_SLICE = timedelta(milliseconds=200)
# How long a rank that found the group broken waits for its peers to say that they are still there.
_ROLL_CALL_S = 1.0
# How what a rank says begins when it takes no further part.
_GAVE_UP = "gave up"
_LOST = re.compile(r"gave up for rank (\d+): (.*)", re.DOTALL)
_CLOSED = "closed its transport (its program ended, or let go of the wrapper: do all ranks run as many iterations?)"
# How many transports each group has seen: construction is collective, so all ranks count alike.
_transports_over: dict[str, int] = {}


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

    # Whether sums of 16-bit numbers of more than two ranks travel and are added in fp32, not as the group adds them.
    widens_sums = True

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
        if kind == "all_reduce" and op == "sum" and dtype.itemsize == 2 and size == 2 and numel > 0:
            return self._add_gathered(source, output, 1.0 / size if average else 1.0)
        wide = dtype
        if dtype.itemsize == 2 and self.widens_sums:
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

    def _add_gathered(self, source: torch.Tensor, output: torch.Tensor, scale: float) -> Handle:
        """The sum of two ranks' 16-bit contributions, which travel as they are; both ranks add them in fp32.

        Half the bytes of an all-reduce in fp32. With more ranks gathering moves as many, or more.
        """
        parts = torch.empty((self.size, source.numel()), dtype=source.dtype)
        handle = self.all_gather(parts.view(-1).view(torch.uint8), source.view(torch.uint8))

        def add() -> None:
            output.copy_(torch.sum(parts, 0, dtype=torch.float32).mul_(scale))

        return _Then(handle, add)


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
        self._pid = os.getpid()
        number = _transports_over.get(group.group_name, 0)
        _transports_over[group.group_name] = number + 1
        self._key = f"gpucomm/roll_call/{group.group_name}/{number}"

    def __del__(self) -> None:
        if getattr(self, "_key", None) and self._failure is None and not sys.is_finalizing():
            self._answer_roll_call(_CLOSED)

    def name(self) -> str:
        return "c10d"

    # The group's own methods: those of torch.distributed add a log record and a warning about names to each call.

    def all_reduce(self, x: torch.Tensor, op: str) -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]  # type: ignore[assignment]
        if x.dtype in _KEY_DTYPES and op in ("min", "max"):
            keys = _ordered_keys(x, op)
            handle = self._start("all_reduce", lambda: self.group.allreduce([keys], options))
            return _Then(handle, lambda: x.copy_(_values_of(keys, x.dtype)))
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
        lost = self._failure if isinstance(self._failure, PeerFailed) else None
        for_whom = f" for rank {lost.rank}: {lost.reason}" if lost else f": {reason}"
        self._answer_roll_call(_GAVE_UP + for_whom)
        self._failure = self._failure or CommError(f"this rank gave up: {reason}")

    def _start(self, what: str, operation: Callable[[], dist.Work]) -> Handle:
        self._refuse_in_child()
        if self._failure is not None:
            raise dead_since(self._failure)
        self._started += 1
        try:
            work = operation()
        except RuntimeError as error:
            raise self._broken(what, str(error)) from error
        return _C10dWork(self, what, work)

    def _refuse_in_child(self) -> None:
        """The sockets that a forked child inherited are its parent's, and nobody in the child serves them."""
        if os.getpid() != self._pid:
            raise ValueError(
                "this process was forked from one that takes part in a group: a child cannot take its place"
            )

    def _wait(self, what: str, work: dist.Work) -> None:
        deadline = time.monotonic() + self.timeout_s
        slices_after_end = slices_without_peer = 0
        while True:
            self._refuse_in_child()
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                # Only a second wait tells an operation that failed from one that completed as the slice ended.
                slices_after_end += work.is_completed()
                if slices_after_end > 1:
                    raise self._broken(what, str(error)) from error
            if slices_after_end:
                continue
            # What a peer sent before it left may still arrive, hence more than one slice.
            left = self._left(self._heed_roll_call(what))
            slices_without_peer = slices_without_peer + 1 if left else 0
            if left and slices_without_peer > 2:
                self._failure = self._peer_failed(*left)
                raise self._failure
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
        gone = [r for r in range(self.size) if r not in here]
        if left := self._left(said):
            self._failure = self._peer_failed(*left)
        elif gone:
            self._failure = self._peer_failed(gone[0], f"no sign of life; {what} ended with: {reason}")
        else:
            self._failure = CommError(f"{what} #{self._started} failed on every rank: {reason}")
        return self._failure

    def _left(self, said: dict[int, str]) -> tuple[int, str] | None:
        """The peer that takes no further part, and why: one that others gave up for, else the first that did."""
        peers = {rank: words for rank, words in sorted(said.items()) if rank != self.rank}
        for words in peers.values():
            if (lost := _LOST.match(words)) and int(lost[1]) != self.global_rank(self.rank):
                return self._global_ranks.index(int(lost[1])), lost[2]
        return next(((r, words) for r, words in peers.items() if words.startswith((_GAVE_UP, _CLOSED))), None)

    def _peer_failed(self, rank: int, reason: str) -> PeerFailed:
        global_rank = self._global_ranks[rank]
        return PeerFailed(f"rank {global_rank} failed: {reason}", global_rank, reason)

    def _others(self) -> list[int]:
        return [self._global_ranks[r] for r in range(self.size) if r != self.rank]

    def _answer_roll_call(self, words: str) -> Any:
        if os.getpid() != self._pid:
            return None  # a forked child does not speak for its parent
        try:
            store = distributed_c10d._get_process_group_store(self.group)
            store.set(f"{self._key}/{self.rank}", words)
        except (KeyError, ValueError, RuntimeError, dist.DistError):
            return None  # the store went with its host, or with destroy_process_group
        return store

    def _heard(self, store: Any) -> dict[int, str]:
        """What the peers said so far, by rank."""
        said: dict[int, str] = {}
        for rank in range(self.size):
            key = f"{self._key}/{rank}"
            try:
                if rank != self.rank and store.check([key]):
                    said[rank] = store.get(key).decode()
            except (RuntimeError, dist.DistError):
                break
        return said

    def _heed_roll_call(self, what: str) -> dict[int, str]:
        """Answers if a peer called. Returns what the peers said."""
        said = self._heard(distributed_c10d._get_process_group_store(self.group))
        if said:
            self._answer_roll_call(f"waiting in {what} #{self._started}")
        return said

    def _roll_call(self, what: str) -> tuple[set[int], dict[int, str]]:
        """Says "here" and looks who else does. Returns the ranks that did and what they said."""
        said: dict[int, str] = {}
        store = self._answer_roll_call(f"waiting in {what} #{self._started}")
        deadline = time.monotonic() + _ROLL_CALL_S
        while store is not None and len(said) < self.size - 1 and time.monotonic() < deadline:
            said = self._heard(store)
            time.sleep(0.02)
        return {self.rank, *said}, said


_KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}


def _ordered_keys(x: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the numbers, a NaN beyond them all: what a backend does with NaN differs, and gloo's
    minimum and maximum lose it.

    Read as an integer, a number without its sign bit grows with its magnitude; a negative one gets those bits inverted.
    """
    integers = _KEY_DTYPES[x.dtype]
    limits = torch.iinfo(integers)
    bits = x.view(integers)
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    return keys.masked_fill_(x.isnan(), limits.min if op == "min" else limits.max)


def _values_of(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys).view(dtype)
    return values.masked_fill_(values.isnan(), float("nan"))


class _C10dWork:
    def __init__(self, transport: C10dTransport, what: str, work: dist.Work) -> None:
        self._transport = transport
        self._what = what
        self._work = work

    def is_completed(self) -> bool:
        self._transport._refuse_in_child()
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
    """A flat tensor over a transport's memory, of the host or a GPU, which lives as long as the tensor does."""
    if memory.device >= 0:
        return cuda.gpu.tensor_over(memory, dtype, numel)
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel)
