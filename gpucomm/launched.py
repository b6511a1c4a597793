"""A rank that launch() has started: calls the function, and reports what became of it.

A result goes back through torch's launcher. An exception is written to the task's folder, as itself: the launcher knows
only texts.
"""

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gpucomm import cuda
from gpucomm.errors import CommTimeout, PeerFailed, StepFailed, text_of

# How long a rank that does not notice Ctrl-C may go on, and one that failed because of a peer waits for the peer's own
# report.
_GRACE_S = 2.0
_POLL_S = 0.02
# A rank that is done waits for the others: they, or their errors, end it.
_LONGEST = timedelta(days=20)


class RankTraceback(Exception):
    """Where an exception was raised in a rank; its text is the traceback."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Task:
    """What a rank is to do. folder: for reports of errors; forked: the ranks are forks of the launching process."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    folder: Path
    with_devices: bool
    forked: bool


@dataclass(frozen=True)
class Report:
    """An exception of a rank. error: pickled, None if it cannot be; raised_ns: on the clock of all processes."""

    rank: int
    raised_ns: int
    because_of_peer: bool
    error: bytes | None
    text: str
    traceback: str


def be_rank(task: Task) -> bytes | None:
    """Calls the task's function with a process group; rank 0 returns its result, pickled. The launcher calls this."""
    _take_signals()
    if task.forked:
        torch.set_num_threads(1)  # before anything that would use the pool of the process that was forked
    rank = dist.get_node_local_rank()
    try:
        return _call(task, rank)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            error = RuntimeError("fn left by exit status 0 in place of returning")
        _report(task, rank, error)
        raise SystemExit(1) from None  # torch would take a KeyboardInterrupt for success, and wait for a result


def _call(task: Task, rank: int) -> bytes | None:
    if task.with_devices:
        cuda.choose(rank)
    store, _, _ = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if task.with_devices else "gloo"
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=task.size)
    value = task.fn(*task.args)
    result = _pickled(value) if rank == 0 else None
    # Leaving early looks like a death to peers that are still in the group.
    if store.add("gpucomm/launch/done", 1) == task.size:
        store.set("gpucomm/launch/all_done", "")
    store.wait(["gpucomm/launch/all_done"], _LONGEST)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def value_of(result: bytes) -> Any:
    """What fn returned, from what be_rank returned on rank 0."""
    return pickle.loads(result)


def first_error(folder: Path) -> BaseException | None:
    """What to raise where ranks failed: the first error that is not about another rank, caused by a RankTraceback."""
    reports = [pickle.loads(path.read_bytes()) for path in folder.glob("*.report")]
    if not reports:
        return None
    report = min(reports, key=lambda report: (report.because_of_peer, report.raised_ns))
    error: BaseException = RuntimeError(f"rank {report.rank} raised {report.text}")
    if report.error is not None:
        error = pickle.loads(report.error)
    error.__cause__ = RankTraceback(report.traceback)
    return error


def _pickled(value: Any) -> bytes:
    try:
        # By value: torch's own queues would pass memory that ends with this process.
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"launch: the result of rank 0, a {type(value).__name__}, cannot be pickled: {error}"
        ) from error


def _report(task: Task, rank: int, error: BaseException) -> None:
    raised_ns = time.monotonic_ns()
    because_of_peer = isinstance(error, (StepFailed, PeerFailed, CommTimeout))
    lines = "".join(traceback.format_exception(error))
    report = Report(rank, raised_ns, because_of_peer, _round_trip(error), text_of(error), f"rank {rank}\n{lines}")
    written = task.folder / f"{rank}.writing"
    written.write_bytes(pickle.dumps(report))
    written.rename(task.folder / f"{rank}.report")
    # The launcher ends all at the first that ends: the peer whose fault it is shall have its say.
    deadline = time.monotonic() + _GRACE_S if because_of_peer else 0
    while time.monotonic() < deadline and len(list(task.folder.glob("*.report"))) < task.size:
        time.sleep(_POLL_S)


def _round_trip(error: BaseException) -> bytes | None:
    """The exception, pickled; None if what comes out of that is none of its type."""
    try:
        pickled = pickle.dumps(error)
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except Exception:
        return None


def _take_signals() -> None:
    """Signals are Python's own again: SIGTERM ends the rank, SIGINT raises KeyboardInterrupt.

    A library's wait does not notice SIGINT; then a thread ends the rank a little later.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    noticed = threading.Event()

    def interrupt(*_: object) -> None:
        noticed.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while os.read(read_end, 1) != bytes([signal.SIGINT]):
            pass
        if not noticed.wait(_GRACE_S):
            os._exit(128 + signal.SIGINT)

    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # written by the C handler, whatever Python is doing
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=watch, name="gpucomm-interrupt", daemon=True).start()
