"""Runs the parts one after the other, each in processes of its own, and takes what they report."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu import report
from gpu.parts import Part
from gpu.place import BENCH, ROOT

_POLL_S = 0.05
_GRACE_S = 2.0  # for a part to say what it was at when its time was over
_LEAST_S = 10.0  # with less a part is not begun
_DRY_RUN_PATIENCE = 4  # a machine that tests may be busy, and may have to compile the stand-ins
_OUTPUT_CHARS = 4000


@dataclass
class Outcome:
    """What became of a part. status: "done", "failed", "timed out" or "not run"; values, details: by row."""

    status: str
    reason: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    values: dict[str, float | bool] = field(default_factory=dict)
    details: dict[str, dict] = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)  # by rank, of a part that failed


@dataclass
class Runner:
    """folder: for what parts leave behind. deadline: on the monotonic clock, of all of it. site: where gpucomm lies.

    environment: variables for all parts. rank_environment: those that a rank needs that shares its GPU.
    """

    folder: Path
    deadline: float
    dry_run: bool
    environment: Mapping[str, str]
    rank_environment: Callable[[int], Mapping[str, str]]
    site: Path | None = None
    stopped: threading.Event = field(default_factory=threading.Event)  # set: what runs is ended, at once

    def run(self, part: Part) -> Outcome:
        left_s = self.deadline - time.monotonic()
        if left_s < _LEAST_S:
            return Outcome("not run", "out of time")
        limit_s = min(part.limit_s * (_DRY_RUN_PATIENCE if self.dry_run else 1), left_s)
        folder = self.folder / part.name
        folder.mkdir()
        started = time.monotonic()
        processes = [self._start(part, rank, folder, limit_s) for rank in range(part.ranks)]
        try:
            in_time = self._wait(processes, started + limit_s + _GRACE_S, part.killed)
        finally:
            for process in processes:
                _end(process)
        outcome = _outcome(part, folder, processes, f"not done after {limit_s:g} s" if not in_time else None)
        outcome.seconds, outcome.limit_s = time.monotonic() - started, limit_s
        return outcome

    def _start(self, part: Part, rank: int, folder: Path, limit_s: float) -> subprocess.Popen:
        command = [sys.executable, "-m", "gpu.process", part.module, "--folder", str(folder), "--rank", str(rank)]
        command += ["--size", str(part.ranks), "--left-s", f"{limit_s:.1f}", *(["--dry-run"] if self.dry_run else [])]
        environment = os.environ | self.environment
        if part.ranks > 1:
            environment |= self.rank_environment(rank)
        # Not the checkout itself but what was built of it, unless that is where it was built.
        paths = [BENCH, *([self.site] if self.site else []), *([ROOT / "tests"] if self.dry_run else [])]
        inherited = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *inherited])
        with open(folder / f"output_{rank}", "wb") as output:
            return subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, processes: list[subprocess.Popen], deadline: float, killed: tuple[int, ...]) -> bool:
        """Until all have ended, or one that must not has failed and the others had a moment; False at the deadline.

        None of them is reaped: their groups' numbers stay theirs until _end().
        """
        running = dict(enumerate(processes))
        while True:
            for rank, process in list(running.items()):
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    continue
                del running[rank]
                if ended.si_status and rank not in killed:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not running:
                return True
            if time.monotonic() > deadline or self.stopped.is_set():
                return False
            time.sleep(_POLL_S)


def _end(process: subprocess.Popen) -> None:
    """The process and what it started, which is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(part: Part, folder: Path, processes: list[subprocess.Popen], too_late: str | None) -> Outcome:
    """From what the ranks left. Rows may come from any of them. too_late: why ranks were ended, if they were."""
    outcome = Outcome("done")
    ranks = [_rank(part, rank, process.returncode, folder, outcome, too_late) for rank, process in enumerate(processes)]
    for status in ("failed", "timed out", "not run"):
        reasons = [(rank, reason) for rank, (of, reason) in enumerate(ranks) if of == status]
        if reasons:
            rank, reason = reasons[0]
            outcome.status = status
            outcome.reason = reason if part.ranks == 1 else f"rank {rank}: {reason}"
            break
    if outcome.status in ("failed", "timed out"):
        for rank in range(part.ranks):
            text = (folder / f"output_{rank}").read_text(encoding="utf-8", errors="replace")
            outcome.output[str(rank)] = text[-_OUTPUT_CHARS:]
    return outcome


def _rank(part: Part, rank: int, code: int, folder: Path, outcome: Outcome, too_late: str | None) -> tuple[str, str]:
    """Takes a rank's rows over; its status, and the reason of that."""
    status, reason = "", ""
    for line in report.read(folder / f"report_{rank}"):
        if "row" in line:
            outcome.values[line["row"]] = line["value"]
            outcome.details[line["row"]] = line["detail"]
        elif "facts" in line:
            outcome.facts |= line["facts"]
        else:
            status, reason = line["status"], line["reason"]
    if rank in part.killed and code == -signal.SIGKILL and not status:
        return "done", ""
    if rank in part.killed and status != "failed":
        return "failed", f"was to be killed, and {_death(code)}"
    if status:
        return status, reason
    return ("timed out", too_late) if too_late else ("failed", _death(code))


def _death(code: int) -> str:
    return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
