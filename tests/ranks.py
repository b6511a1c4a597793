"""Runs a function on several ranks, for tests.

    def body(rank, world, scale):
        x = torch.full((3,), scale * (rank + 1.0))
        dist.all_reduce(x)
        return x

    first, second = run_ranks(body, 2, 10.0)

Ranks are forked from the pytest process, where torch is imported already, so two of them cost a few hundredths of a
second. `body` may be a closure; its value must be picklable. Each rank is the leader of its own process group, so what
it started ends with it, and dies when pytest dies. The torch store lives in the pytest process, as it lives in
torchrun's agent: killing rank 0 leaves the others a store. A rank that returned waits until all have: leaving early
would look like a death to its peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


class RanksFailed(Exception):
    """A rank raised, died or hung; the text holds what each rank said."""


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    error_type: str | None = None  # name of the exception's class
    error_text: str | None = None  # its traceback
    error_attributes: dict[str, Any] = field(default_factory=dict)  # what of vars(exception) can be pickled
    exitcode: int | None = None  # negative: the signal that ended it
    seconds: float = 0.0  # that the function ran; for a rank that died, until its death
    output: str = ""  # what it wrote to stdout and stderr
    reported: bool = False  # it came back with a value or an exception
    hung: bool = False  # it was killed at the timeout

    def complaint(self) -> str | None:
        """Why this rank failed, or None."""
        if self.hung:
            what = f"rank {self.rank} hung and was killed after {self.seconds:.1f} s"
        elif self.error_text is not None:
            what = f"rank {self.rank} raised after {self.seconds:.1f} s\n{self.error_text.rstrip()}"
        elif not self.reported:
            what = f"rank {self.rank} died with exit code {self.exitcode} after {self.seconds:.1f} s"
        else:
            return None
        return what + (f"\nrank {self.rank} wrote:\n{self.output.rstrip()}" if self.output.strip() else "")


@dataclass
class _Rank:
    """The parent's side of one rank."""

    outcome: Outcome
    pid: int
    pid_fd: int
    report_fd: int
    output_file: Any
    started: float
    received: bytearray = field(default_factory=bytearray)

    def receive(self) -> None:
        """Take what the report pipe holds; never blocks."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.report_fd, 1 << 20):
                self.received += chunk
        if self.outcome.reported or len(self.received) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self.received)
        if len(self.received) == _LENGTH.size + length:
            for name, value in pickle.loads(bytes(self.received[_LENGTH.size :])).items():
                setattr(self.outcome, name, value)
            self.outcome.reported = True

    def reap(self) -> None:
        """The rank has ended: what it started ends too, and its exit code is taken."""
        self.receive()
        # Not reaped yet, so the group's number cannot have passed to anybody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.outcome.exitcode = os.waitstatus_to_exitcode(status)
        if not self.outcome.reported:
            self.outcome.seconds = time.monotonic() - self.started
        self.output_file.seek(0)
        self.outcome.output = self.output_file.read().decode(errors="replace")
        self.output_file.close()
        os.close(self.pid_fd)
        os.close(self.report_fd)


def run_ranks(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str = "gloo",
    init: bool = True,
    expect_failures: bool = False,
) -> list[Any]:
    """Call fn(rank, nprocs, *args) on nprocs ranks; return the values in rank order.

    With init the default process group exists when fn is called; without, the environment is set as torchrun does and
    fn may make it. Raises RanksFailed if a rank raised, died, or did not return within timeout_s (then its stack is
    in the text). With expect_failures nothing is raised and the list holds Outcomes.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, nprocs))
    release_r, release_w = os.pipe()
    ranks: list[_Rank] = []
    store = None
    try:
        for rank in range(nprocs):
            ranks.append(_fork(rank, nprocs, fn, args, backend, init, timeout_s, listener, release_r, release_w))
        # Made after the forks: its thread must not exist when a rank is forked. Ranks queue at the listener until then.
        port = listener.getsockname()[1]
        store = _store_at(port, listener.detach())
        release_w = _wait(ranks, time.monotonic() + timeout_s, release_w)
    finally:
        for fd in (release_r, release_w):
            if fd >= 0:
                os.close(fd)
        for entry in ranks:
            if entry.outcome.exitcode is None:
                os.kill(entry.pid, signal.SIGKILL)
                entry.reap()
        del store
        listener.close()
    outcomes = [entry.outcome for entry in ranks]
    if expect_failures:
        return outcomes
    complaints = [complaint for outcome in outcomes if (complaint := outcome.complaint())]
    if complaints:
        hung = [outcome.rank for outcome in outcomes if outcome.hung]
        head = f"{len(complaints)} of {nprocs} ranks failed" + (f"; hung: {hung}" if hung else "")
        raise RanksFailed("\n\n".join([head, *complaints]))
    return [outcome.value for outcome in outcomes]


def _store_at(port: int, listen_fd: int) -> dist.TCPStore:
    """The ranks' store, served at a listener that it takes over."""
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    try:
        return dist.TCPStore("127.0.0.1", port, **options)
    except NotImplementedError:  # torch 2.6 takes a listener without libuv only
        return dist.TCPStore("127.0.0.1", port, use_libuv=False, **options)


def _wait(ranks: list[_Rank], deadline: float, release_w: int) -> int:
    """Serve the ranks until all have ended, killing those still there at the deadline.

    Returns release_w, or -1 once it has been closed, which lets the ranks that returned exit.
    """
    with selectors.DefaultSelector() as selector:
        for entry in ranks:
            selector.register(entry.pid_fd, selectors.EVENT_READ, (entry, entry.reap))
            selector.register(entry.report_fd, selectors.EVENT_READ, (entry, entry.receive))
        running = list(ranks)
        while running:
            left = deadline - time.monotonic()
            if left <= 0:
                _kill_hung([entry for entry in running if not entry.outcome.reported])
                deadline = float("inf")  # SIGKILL cannot be refused: the pid file descriptors become readable
                continue
            for key, _ in selector.select(None if left == float("inf") else left):
                entry, handle = key.data
                if entry not in running:
                    continue
                if handle == entry.reap:
                    selector.unregister(entry.pid_fd)
                    if entry.report_fd in selector.get_map():
                        selector.unregister(entry.report_fd)
                    running.remove(entry)
                handle()
                if handle == entry.receive and entry.outcome.reported:
                    selector.unregister(entry.report_fd)
            if release_w >= 0 and all(entry.outcome.reported for entry in running):
                os.close(release_w)
                release_w = -1
    return release_w


def _kill_hung(hung: list[_Rank]) -> None:
    """Have each hung rank write its stacks, then end it."""
    for entry in hung:
        entry.outcome.hung = True
        os.kill(entry.pid, signal.SIGUSR1)
    time.sleep(0.2)
    for entry in hung:
        os.kill(entry.pid, signal.SIGKILL)


def _fork(
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    init: bool,
    timeout_s: float,
    listener: socket.socket,
    release_r: int,
    release_w: int,
) -> _Rank:
    report_r, report_w = os.pipe()
    output_file = tempfile.TemporaryFile()
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in a process with threads; torch's own idle ones are the only ones here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        exitcode = 1
        try:
            os.close(release_w)
            os.close(report_r)
            port = listener.getsockname()[1]
            listener.close()
            _become_rank(rank, world, port, parent, output_file.fileno())
            succeeded, report = _call(fn, rank, world, args, backend, init, timeout_s)
            sys.stdout.flush()
            _send(report_w, report)
            if succeeded:
                os.read(release_r, 1)  # end of file: all ranks are done
                exitcode = 0
        finally:
            os._exit(exitcode)
    os.close(report_w)
    os.set_blocking(report_r, False)
    return _Rank(Outcome(rank), pid, os.pidfd_open(pid), report_r, output_file, started)


def _become_rank(rank: int, world: int, port: int, parent: int, output_fd: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(source, target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # no rank makes the store: it exists
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)


# What surrounds the function in each rank: nothing, or what conftest.py puts here.
def around(rank: int, world: int) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def _call(
    fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], backend: str, init: bool, timeout_s: float
) -> tuple[bool, bytes]:
    """Call fn; return whether it returned, and the fields of its Outcome, pickled."""
    started = time.monotonic()
    try:
        if init:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            _wait_for_all(world)
            started = time.monotonic()
        with around(rank, world):
            value = fn(rank, world, *args)
        return True, pickle.dumps({"value": value, "seconds": time.monotonic() - started})
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes after the end is nothing to report
        report = {
            "error_type": type(error).__name__,
            "error_text": "".join(traceback.format_exception(error)),
            "error_attributes": {name: value for name, value in vars(error).items() if _can_be_pickled(value)},
            "seconds": time.monotonic() - started,
        }
        return False, pickle.dumps(report)


def _wait_for_all(world: int) -> None:
    """Return when every rank has its process group, so that a body that dies at once does not break a peer's making."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("run_ranks/ready", 1) == world:
        store.set("run_ranks/all_ready", "")
    store.wait(["run_ranks/all_ready"])


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def _send(fd: int, report: bytes) -> None:
    view = memoryview(_LENGTH.pack(len(report)) + report)
    while view:
        view = view[os.write(fd, view) :]
