"""Who the ranks are and what they talk through: settings from the environment, the handshake, the choice of transport.

The only file that reads environment variables (`GPUCOMM_*`), or sets any.
"""

import json
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpucomm import _core
from gpucomm.errors import CommError, CommTimeout, TransportUnavailable
from gpucomm.transport import C10dTransport, Transport
from gpucomm.version import __version__

NONFINITE = ("pass", "raise", "skip")
TRANSPORTS = ("auto", "shm", "c10d", "loopback", "nccl")
WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# All-gather of byte strings, in rank order. Slow (through the rendezvous store): for construction only.
Exchange = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. An argument given in code wins over its variable.

    cuda_library, nccl_library: paths or names of the libraries to load; empty for those that are found.
    """

    transport: str = "auto"
    timeout_s: float | None = None
    wire_dtype: torch.dtype | None = None
    nonfinite: str = "pass"
    cuda_library: str = ""
    nccl_library: str = ""

    @classmethod
    def from_environment(cls) -> "Settings":
        """Raises ValueError, naming the variable, for a value that is not accepted."""
        transport = os.environ.get("GPUCOMM_TRANSPORT") or "auto"
        if transport not in TRANSPORTS:
            raise ValueError(f"GPUCOMM_TRANSPORT is {transport!r}, accepted are {', '.join(TRANSPORTS)}")
        timeout_s = None
        if text := os.environ.get("GPUCOMM_TIMEOUT_S"):
            try:
                timeout_s = float(text)
            except ValueError:
                timeout_s = 0.0
            if not timeout_s > 0:
                raise ValueError(f"GPUCOMM_TIMEOUT_S is {text!r}, accepted is a positive number of seconds")
        wire = os.environ.get("GPUCOMM_WIRE_DTYPE") or None
        if wire is not None and wire not in WIRE_DTYPES:
            raise ValueError(f"GPUCOMM_WIRE_DTYPE is {wire!r}, accepted are {', '.join(WIRE_DTYPES)}")
        nonfinite = os.environ.get("GPUCOMM_NONFINITE") or "pass"
        if nonfinite not in NONFINITE:
            raise ValueError(f"GPUCOMM_NONFINITE is {nonfinite!r}, accepted are {', '.join(NONFINITE)}")
        return cls(
            transport,
            timeout_s,
            WIRE_DTYPES[wire] if wire else None,
            nonfinite,
            _library("GPUCOMM_CUDA_LIBRARY"),
            _library("GPUCOMM_NCCL_LIBRARY"),
        )


def _library(variable: str) -> str:
    """What the variable names: a file, made absolute, or a name for the system's loader. Empty if it is not set."""
    path = os.environ.get(variable) or ""
    if os.sep not in path:
        return path
    if not os.path.isfile(path):
        raise ValueError(f"{variable} is {path!r}, accepted is the path of a file, or a name that the loader finds")
    return os.path.abspath(path)


def kernel_cache_folder() -> str:
    """Where kernels that were compiled at run time are kept, as the XDG base directories have it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "gpucomm", "kernels")


def shares_gpus() -> bool:
    """Whether NCCL was told that several ranks use one GPU: from 2.30 on, or by giving each rank a host of its own."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or bool(os.environ.get("NCCL_HOSTID"))


def environment_values(names: Iterable[str]) -> dict[str, str]:
    """Variables of torch and of the launcher, to be reported only; "N/A" for one that is not set."""
    return {name: os.environ.get(name, "N/A") for name in names}


@contextmanager
def environment(variables: Mapping[str, str | None], prepend: Collection[str] = ()) -> Iterator[None]:
    """Sets environment variables for child processes, within the block; None leaves one as it is.

    Those named in prepend are search paths: the value comes before the present one.
    """
    before = dict(os.environ)
    for name, value in variables.items():
        if value is not None:
            os.environ[name] = os.pathsep.join(filter(None, [value, before.get(name)])) if name in prepend else value
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@dataclass(frozen=True)
class World:
    """The ranks of one process group, as one rank sees them, and what it asks for. transport: a name or an instance.

    wire: a text about the form in which gradients travel, to be the same on all ranks.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    global_ranks: list[int]
    timeout_s: float
    transport: str | Transport
    wire: str = ""

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None,
        timeout: timedelta | float | None = None,
        transport: str | Transport = "auto",
        wire: str = "",
    ) -> "World":
        """The default group's, if group is None. timeout: seconds, default the group's own.

        transport "auto" is what the environment says. Raises ValueError for an unknown transport and for a timeout that
        is none, RuntimeError without a process group.
        """
        group = _usable(group)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the process group")
        ranks = dist.get_process_group_ranks(group)
        return cls(group, rank, len(ranks), ranks, _timeout_s(group, timeout), _transport(transport), wire)

    def meet(self) -> Exchange:
        """The first round of a construction; collective. Returns the exchange for those that follow.

        Raises CommError on every rank if one of them withdrew, if their versions of gpucomm or the transports that they
        ask for differ, and CommTimeout naming the missing rank.
        """
        exchange = self._exchange()
        hellos = [json.loads(text) for text in exchange(_hello(_name_of(self.transport), self.wire))]
        for rank, hello in enumerate(hellos):
            if hello["withdrew"]:
                raise CommError(f"rank {self.global_ranks[rank]} could not take part: {hello['withdrew']}")
        for field, what in (("version", "gpucomm version"), ("transport", "transport"), ("wire", "wire dtype")):
            for rank, hello in enumerate(hellos):
                mine, theirs = hellos[0][field], hello[field]
                if mine != theirs:
                    first, other = self.global_ranks[0], self.global_ranks[rank]
                    raise CommError(
                        f"{what} differs between ranks: {mine!r} on rank {first}, {theirs!r} on rank {other}"
                    )
        return exchange

    def _exchange(self) -> Exchange:
        """The all-gather that construction uses, through the group's store. Its CommTimeout names who is missing."""
        store = distributed_c10d._get_process_group_store(self.group)
        number = _exchanges.get(self.group.group_name, 0)
        _exchanges[self.group.group_name] = number + 1
        rounds = 0

        def gather(mine: bytes) -> list[bytes]:
            nonlocal rounds
            prefix = f"gpucomm/{number}/{rounds}"
            store.set(f"{prefix}/{self.rank}", mine)  # type: ignore[arg-type]
            everything = []
            for rank in range(self.size):
                key = f"{prefix}/{rank}"
                try:
                    store.wait([key], timedelta(seconds=self.timeout_s))
                except dist.DistStoreError as error:
                    global_rank = self.global_ranks[rank]
                    message = f"construction: rank {global_rank} did not come within {self.timeout_s:g} s"
                    raise CommTimeout(message, [global_rank]) from error
                everything.append(store.get(key))
            # Everybody who is here has read what was set two rounds ago.
            if rounds >= 2:
                store.delete_key(f"gpucomm/{number}/{rounds - 2}/{self.rank}")
            rounds += 1
            return everything

        return gather

    def connect(self, exchange: Exchange) -> _core.Transport:
        """The transport that was asked for, for host memory; collective. With "nccl", what goes beside it.

        Raises TransportUnavailable, on every rank, for one that cannot be had. "auto" takes shared memory if every rank
        of the group has it, else the process group itself.
        """
        if isinstance(self.transport, _core.Transport):
            return self.transport
        if self.transport == "loopback" or (self.transport in ("auto", "nccl") and self.size == 1):
            return _core.LoopbackTransport(self.size)
        if self.transport == "c10d":
            return C10dTransport(self._host_group(), self.timeout_s)
        try:
            return _core.ShmTransport(
                rank=self.rank,
                size=self.size,
                timeout_s=self.timeout_s,
                exchange=exchange,
                global_ranks=self.global_ranks,
            )
        except TransportUnavailable:
            if self.transport == "shm":
                raise
            return C10dTransport(self._host_group(), self.timeout_s)

    def _host_group(self) -> dist.ProcessGroup:
        """The group, or one of the same ranks over gloo if it takes tensors of GPUs only; collective then."""
        if torch.device("cpu") in self.group._device_types:
            return self.group
        timeout = timedelta(seconds=self.timeout_s)
        made = dist.new_group(self.global_ranks, timeout, backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made


@contextmanager
def withdrawing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Around what a rank does by itself before World.meet(): what it raises there, its peers raise when they meet.

    So a construction that one rank refuses, for an argument or an environment of its own, fails on all of them at once.
    """
    try:
        yield
    except Exception as error:
        if dist.is_initialized():
            _withdraw(group if group is not None else dist.group.WORLD, f"{type(error).__name__}: {error}")
        raise


def _withdraw(group: dist.ProcessGroup | None, reason: str) -> None:
    if not isinstance(group, dist.ProcessGroup) or group in _inherited:
        return
    with suppress(RuntimeError, ValueError, KeyError):  # nobody comes, or the store went: the reason counts
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        if rank >= 0:
            # The store may live in this process: it stays until the peers had the time to come.
            World(group, rank, len(ranks), ranks, _LINGER_S, "auto")._exchange()(_hello("", "", reason))


def _hello(transport: str, wire: str, withdrew: str = "") -> bytes:
    hello = {"version": __version__, "transport": transport, "wire": wire, "withdrew": withdrew}
    return json.dumps(hello).encode()


def _name_of(transport: str | Transport) -> str:
    return transport if isinstance(transport, str) else f"an instance of {type(transport).__name__}"


def _usable(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "Default process group has not been initialized, please call init_process_group first (in a program that "
            "torchrun or `gpucomm run` starts, or in a function given to gpucomm.launch)."
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    if group in _inherited:
        raise RuntimeError(
            "this process was forked from one with this process group: a child cannot take its place in the group"
        )
    return group


def nonfinite_policy(policy: str | None) -> str:
    """The one asked for, by argument or else by the environment. Raises ValueError for one that there is not."""
    if policy is None:
        return Settings.from_environment().nonfinite
    if policy not in NONFINITE:
        raise ValueError(f"nonfinite is {policy!r}, accepted are {', '.join(NONFINITE)}")
    return policy


def _transport(transport: str | Transport) -> str | Transport:
    if isinstance(transport, _core.Transport):
        return transport
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, accepted are {', '.join(TRANSPORTS)} or a Transport")
    return Settings.from_environment().transport if transport == "auto" else transport


# How long a rank that withdraws waits for its peers.
_LINGER_S = 2.0

# How many exchanges each group has seen: construction is collective, so all ranks count alike.
_exchanges: dict[str, int] = {}


# The process groups that were there when this process was forked: their sockets are the parent's.
_inherited: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def _after_fork() -> None:
    _inherited.update(distributed_c10d._world.pg_map)
    _exchanges.clear()


os.register_at_fork(after_in_child=_after_fork)


# torch's stores count waits in milliseconds of 32 bits; 23 days stand for no timeout at all.
_LONGEST_S = 2_000_000.0


def _timeout_s(group: dist.ProcessGroup, timeout: timedelta | float | None) -> float:
    if timeout is None:
        timeout = Settings.from_environment().timeout_s
    if timeout is None:
        backend = group._get_backend(next(iter(group._device_types)))
        timeout = backend.options._timeout if hasattr(backend, "options") else distributed_c10d.default_pg_timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout is {timeout!r}, accepted is a positive timedelta or number of seconds")
    return min(seconds, _LONGEST_S)
