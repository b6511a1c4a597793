"""launch: a function on several ranks of this machine, from a plain script or a notebook cell.

Torch's elastic launcher starts the ranks and watches over them; launched.py is what they run.
"""

import gc
import logging
import multiprocessing
import signal
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpucomm import cuda
from gpucomm.errors import PeerFailed
from gpucomm.launched import Task, be_rank, first_error, value_of
from gpucomm.world import environment

T = TypeVar("T")

_TALKERS = ("torch.distributed.elastic", "torch.multiprocessing")

# torch's launcher takes these over, and does not give them back.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def one_host(count: int, folder: str, start_method: str = "spawn") -> LaunchConfig:
    """For torch's elastic launcher: `count` ranks on this machine, once. folder: for logs, which it leaves behind."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


def launch(fn: Callable[..., T], *args: Any, nprocs: int | None = None) -> T:
    """Calls fn(*args) on several ranks of this machine at once, and returns what it returned on rank 0.

    In each rank the default process group exists when fn is called, and is destroyed afterwards. Blocks until all ranks
    have ended; none is left behind, whatever happens.

    Ranks are forked from this process. So fn may be anything, a closure or a function of a notebook's cell, and sees
    what this process has, as it is now. They compute with one thread each (torch.set_num_threads): this process's
    threads are not forked, and a pool that misses its own would wait for ever. If CUDA is in use here, ranks are
    started anew instead (spawn): fn and args must be picklable, and fn from an importable module.

    Args:
        fn: what each rank does. Its result on rank 0 must be picklable, tensors are copied.
        args: passed to fn.
        nprocs: how many ranks. None: one for each CUDA device, which is made its current one, with a group of gloo for
            the CPU's tensors and nccl for the devices'. A number: with a device each if there are as many devices,
            otherwise CPU ranks over gloo.

    Raises:
        What the first rank to fail raised, where that can be pickled, otherwise a RuntimeError with its type and text;
            the traceback in the rank is its __cause__.
        PeerFailed: a rank was killed, or left without a word.
        KeyboardInterrupt: at Ctrl-C, when the ranks have ended.
        TypeError, ValueError: for arguments that cannot be served, and a result that cannot be pickled.
        RuntimeError: this process is a rank itself.
    """
    count, with_devices = _ranks(nprocs)
    method = "spawn" if cuda.is_in_use() else "fork"
    _check(fn, args, method)
    with tempfile.TemporaryDirectory(prefix="gpucomm-") as folder, _surroundings():
        task = Task(fn, args, count, Path(folder), with_devices, forked=method == "fork")
        try:
            return value_of(elastic_launch(one_host(count, folder, method), be_rank)(task)[0])
        except ChildFailedError as failed:
            outcome: BaseException | signal.Signals = first_error(task.folder) or _gone(failed)
        except SignalException as end:
            outcome = end.sigval
    gc.collect()  # the launcher's own exception keeps its store, a thread and a dozen files in a cycle
    if isinstance(outcome, BaseException):
        raise outcome
    signal.raise_signal(outcome)  # for the handler that was there before
    raise RuntimeError(f"launch: the ranks were ended by {outcome.name}")


def _ranks(nprocs: int | None) -> tuple[int, bool]:
    """How many ranks, and whether each has a device."""
    devices = cuda.device_count()
    if nprocs is None:
        if not devices:
            raise ValueError("nprocs is None and this machine has no CUDA device: accepted is a number of CPU ranks")
        return devices, True
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"nprocs is {nprocs!r}, accepted are None and a number of ranks, 1 or more")
    return nprocs, nprocs <= devices


def _check(fn: Any, args: tuple, method: str) -> None:
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}, accepted is a function")
    if dist.is_torchelastic_launched():
        raise RuntimeError("launch: this process is a rank already, started by torchrun or by launch")
    if dist.is_initialized():
        raise RuntimeError("launch: this process has a process group; destroy it first, or call fn without launch")
    if method == "spawn":
        try:
            ForkingPickler.dumps((fn, args))
        except Exception as error:
            raise TypeError(
                "launch: CUDA is in use in this process, so ranks cannot be forked, and fn or its arguments cannot be "
                f"sent to new ones: {error}. Call launch before CUDA is used, or define fn in a module"
            ) from error


def _gone(failed: ChildFailedError) -> PeerFailed:
    """What to raise where no rank has reported."""
    rank, failure = failed.get_first_failure()
    what = f"was ended by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "ended without a word"
    return PeerFailed(f"launch: rank {rank} {what} (exit status {failure.exitcode})", rank, what)


@contextmanager
def _surroundings() -> Iterator[None]:
    """What the launcher changes in this process is as before afterwards, and no rank is left."""
    children = set(multiprocessing.active_children())
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if in_main else {}
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_TALKERS)]
    loggers = [logger for name in names if not (logger := logging.getLogger(name)).disabled]
    variables = {
        # The launcher asks for devices, and a process that forks must not have CUDA's driver in it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in _SIGNALS),  # set for good otherwise
    }
    try:
        for logger in loggers:  # what they have to say is raised
            logger.disabled = True
        with environment(variables), warnings.catch_warnings():
            # Python 3.12 warns of forks in a process with threads; see launch() on them.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            yield
    finally:
        for child in set(multiprocessing.active_children()) - children:
            child.kill()
            child.join()
        for logger in loggers:
            logger.disabled = False
        for number, handler in handlers.items():
            if handler is not None:  # None: not Python's, and not to be had again
                signal.signal(number, handler)
