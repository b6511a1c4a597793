"""Starts the ranks of one process set on this host, as torchrun would: unpinned, one compute thread each.

The parent runs the script once per rank with the same command line and a few variables that say who the rank is.
With Open MPI among the arms the ranks are started by mpirun (without binding), so that it too is timed within the
one process set.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from gate import Gate
from torch.distributed import TCPStore

# Freed multi-megabyte gradients are otherwise unmapped and faulted in again in every step, which swamps the comparison.
# glibc ignores an mmap threshold above 32 MiB, and sticks to 128 KiB then: worse than saying nothing.
_MALLOC_MMAP_BYTES = str(32 << 20)
_MALLOC_KEEP_BYTES = str(16 << 30)
_POLL_S = 0.1


class LaunchError(RuntimeError):
    """A process set cannot be started here, a rank of it ended with an error, or it ran past its deadline."""


@dataclass(frozen=True)
class Hosts:
    """Where the ranks run. prefixes: by rank, the words before its command line; env: variables for all of them.

    store_address: where rank 0 listens for the others, host and port; None: the parent does, on this host.
    """

    prefixes: Sequence[Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    store_address: tuple[str, int] | None = None


@contextlib.contextmanager
def this_host(size: int) -> Iterator[Hosts]:
    """All ranks beside their parent."""
    yield Hosts([()] * size)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Its default action would leave behind the ranks, and what was made for them."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_rank() -> bool:
    """True in a process that `start_ranks` started."""
    return "GPUCOMM_BENCH_SIZE" in os.environ


def mpi_missing() -> str | None:
    """Why Open MPI cannot be an arm here; None if it can."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed"
    probe = subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True, check=False)
    return "mpi4py is not installed" if probe.returncode else None


def start_ranks(script: str, argv: list[str], hosts: Hosts, with_mpi: bool, timeout_s: float) -> None:
    """Runs `script argv` as one rank for each of the hosts and waits; LaunchError names the first rank that failed."""
    size = len(hosts.prefixes)
    address, served = hosts.store_address, None
    if address is None:
        wait = timedelta(seconds=timeout_s)
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        address = ("127.0.0.1", served.port)
    gate = os.memfd_create("gpucomm_bench_gate")  # opened by the ranks through /proc: no name, nothing left behind
    with os.fdopen(gate, "wb"):
        os.truncate(gate, Gate.bytes_for(size))
        env = os.environ | {
            "GPUCOMM_BENCH_SIZE": str(size),
            "GPUCOMM_BENCH_STORE_HOST": address[0],
            "GPUCOMM_BENCH_STORE_PORT": str(address[1]),
            "GPUCOMM_BENCH_STORE_SERVER": "rank 0" if served is None else "parent",
            "GPUCOMM_BENCH_GATE": f"/proc/{os.getpid()}/fd/{gate}",
            "GPUCOMM_BENCH_LAUNCHER": "mpirun" if with_mpi else "processes",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": _MALLOC_MMAP_BYTES,
            "MALLOC_TRIM_THRESHOLD_": _MALLOC_KEEP_BYTES,
        }
        env |= hosts.env
        command = [sys.executable, script, *argv]
        processes: list[subprocess.Popen] = []
        try:
            if with_mpi:
                processes.append(subprocess.Popen(_mpirun(size) + command, env=env))
            else:
                for rank, prefix in enumerate(hosts.prefixes):
                    ranked = env | {"GPUCOMM_BENCH_RANK": str(rank)}
                    processes.append(subprocess.Popen([*prefix, *command], env=ranked))
            _wait_for(processes, timeout_s)
        finally:
            _end(processes)


def _mpirun(size: int) -> list[str]:
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(size)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    if size > len(os.sched_getaffinity(0)):
        command[1:1] = ["--mca", "mpi_yield_when_idle", "1"]
    return command


def _wait_for(processes: list[subprocess.Popen], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code:
                raise LaunchError(f"process {index} of {len(processes)} ended with status {code}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise LaunchError(f"the ranks were not done after {timeout_s} s")
        time.sleep(_POLL_S)


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
