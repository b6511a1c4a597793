"""What a process holds of the machine, read from /proc: for tests that nothing is left behind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Footprint:
    """A process at one moment. Memory maps and file descriptors of memfds count as memfds."""

    shm_entries: frozenset[str]  # of the whole machine
    fds: dict[int, str]  # number -> what it points to
    memfds: tuple[str, ...]  # one for each file descriptor and each mapping
    threads: int
    children: frozenset[int]

    def grown_since(self, earlier: Footprint) -> str:
        """What is there now and was not earlier, as text; empty if nothing."""
        found = []
        if entries := self.shm_entries - earlier.shm_entries:
            found.append(f"/dev/shm entries {sorted(entries)}")
        if len(self.fds) > len(earlier.fds):
            fresh = {fd: target for fd, target in self.fds.items() if earlier.fds.get(fd) != target}
            found.append(f"{len(self.fds) - len(earlier.fds)} more file descriptors, among {fresh}")
        if len(self.memfds) > len(earlier.memfds):
            found.append(f"{len(self.memfds) - len(earlier.memfds)} more memfds or mappings of them: {self.memfds}")
        if self.threads > earlier.threads:
            found.append(f"{self.threads - earlier.threads} more threads")
        if children := self.children - earlier.children:
            found.append(f"child processes {sorted(children)}")
        return "; ".join(found)


def footprint(pid: int | None = None) -> Footprint:
    """The footprint of process pid (default: this one), which must be ours to look at."""
    pid = os.getpid() if pid is None else pid
    fds = open_fds(pid)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return Footprint(
        shm_entries=shm_entries(),
        fds=fds,
        memfds=tuple(target for target in fds.values() if "/memfd:" in target) + mapped_memfds(pid),
        threads=len(tasks),
        children=frozenset(int(child) for task in tasks for child in _children_of(task)),
    )


def _children_of(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:
        return []  # a thread that has ended meanwhile


def shm_entries() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))


def open_fds(pid: int) -> dict[int, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue  # closed since the folder was read, as the one for the listing itself
        found[int(name)] = target
    return found


def mapped_memfds(pid: int) -> tuple[str, ...]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return tuple(line.split(maxsplit=5)[5] for line in lines if "/memfd:" in line)
