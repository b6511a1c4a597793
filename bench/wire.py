"""A wire between two hosts on one machine: two network namespaces joined by a veth pair, each end held to a real
wire's rate by a token bucket.

Needs root and iproute2. The name of a namespace says which process made it, and when that process started, so that
what a killed run left behind is recognised by the next one and removed. The interfaces live inside the namespaces and
go with them.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator

from launch import Hosts, LaunchError

RATE_BITS_PER_S = 1_000_000_000
SHAPE = ["rate", f"{RATE_BITS_PER_S}bit", "burst", "256kb", "latency", "100ms"]
DEVICE = "wire"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_STORE_PORT = 29500  # in a namespace of its own every port is free
_NAME = re.compile(r"gpucomm_bench_(\d+)_(\d+)_[01]")


@contextlib.contextmanager
def two_hosts(size: int) -> Iterator[Hosts]:
    """One rank in each of two namespaces, which are removed again whatever happens inside.

    LaunchError: not two ranks, not root, no iproute2, or a namespace or the wire cannot be made.
    """
    if size != 2:
        raise LaunchError(f"the wire joins 2 ranks, not {size}")
    if (reason := why_not()) is not None:
        raise LaunchError(reason)
    remove_leftovers()
    stem = _stem(os.getpid())
    names = [f"{stem}_{end}" for end in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _join(names)
        yield Hosts(
            [("ip", "netns", "exec", name) for name in names],
            # torch's warnings: it looks up the host names of these addresses in vain.
            {"GLOO_SOCKET_IFNAME": DEVICE, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            (_ADDRESSES[0], _STORE_PORT),
        )
    finally:
        _remove(name for name in existing() if name.startswith(stem))


def why_not() -> str | None:
    """Why no namespaces can be made here, as far as a look tells; None if they can."""
    if os.geteuid() != 0:
        return f"network namespaces need root, this process is user {os.geteuid()}"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"no command {command!r}: iproute2 is not installed (Debian, Ubuntu: apt-get install iproute2)"
    return None


def remove_leftovers() -> None:
    """Removes the namespaces of runs whose process is gone."""
    _remove(name for name in existing() if not name.startswith(_stem(int(_NAME.fullmatch(name)[1]))))


def _join(names: list[str]) -> None:
    first, second = names
    _run("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
    for name, address in zip(names, _ADDRESSES, strict=True):
        _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _run("ip", "-n", name, "link", "set", device, "up")
        _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *SHAPE)


def existing() -> list[str]:
    """The namespaces that benchmarks made and did not remove yet."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]
    return [name for name in names if _NAME.fullmatch(name)]


def _remove(names: Iterator[str]) -> None:
    # Not to be interrupted halfway, nor are the commands: they inherit the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        for name in names:
            _run("ip", "netns", "delete", name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stem(pid: int) -> str:
    """How the names of a process's namespaces begin; of a process that is gone, what no name begins with."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            started = file.read().rpartition(")")[2].split()[19]  # in clock ticks since boot: pids are used again
    except FileNotFoundError:
        started = "gone"
    return f"gpucomm_bench_{pid}_{started}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
