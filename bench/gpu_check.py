"""gpucomm on a machine with an NVIDIA GPU: built from source, tested, and measured, in less than five minutes.

    python bench/gpu_check.py --out gpu.json

Needs torch with CUDA, CMake and a C++ compiler (nvcc if there is one), pybind11 and scikit-build-core; no network. One
GPU is enough: where ranks are needed they share it. Each part has processes and a time limit of its own (gpu/parts.py);
what fails or hangs leaves the others alone, and the file holds the results so far. --dry-run runs all of it without a
GPU, over the stand-ins of the tests, with tiny sizes: it measures nothing.
"""

import argparse
import contextlib
import datetime
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu import environment
from gpu.parts import MACHINE, PARTS, Part
from gpu.place import ROOT
from gpu.results import Results
from gpu.runner import Outcome, Runner


def main() -> int:
    args = options().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without ending what was started
    chosen = [part for part in PARTS if part.name in args.parts]
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        runner = Runner(
            Path(scratch),
            time.monotonic() + args.budget_s,
            args.dry_run,
            environment.of_all(args.nccl),
            lambda rank: environment.of_sharing_rank(rank, nccl_version),
        )
        machine = runner.run(MACHINE)
        nccl_version = machine.facts.get("nccl_version", 0)
        head = {"bench": "gpu_check", "dry_run": args.dry_run, "date": now(), "commit": commit()}
        head |= {"machine": machine.facts, "nccl_library": args.nccl, "budget_s": args.budget_s}
        results = Results(head, args.out, args.dry_run)
        print("  ".join(f"{key} {value}" for key, value in machine.facts.items() if value is not None))
        results.add(MACHINE, machine)
        if machine.status != "done":
            print(f"gpu_check: {machine.reason or machine.status}", file=sys.stderr)
            return 1
        for part, outcome in outcomes(runner, chosen, args.installed):
            results.add(part, outcome)
        print("\n" + results.summary())
    return 0 if results.succeeded() else 1


def outcomes(runner: Runner, chosen: Sequence[Part], installed: bool) -> Iterator[tuple[Part, Outcome]]:
    """Of each part in turn; those that need gpucomm are not run where it could not be built.

    One after the other; in a dry run, which measures nothing, two at once.
    """
    missing = ""
    for part in chosen:
        if not part.needs_package:
            outcome = Outcome("not run", "what is installed is taken") if installed else runner.run(part)
            missing = "" if installed or outcome.status == "done" else "gpucomm was not built"
            yield part, outcome
    if not installed and not runner.dry_run and not missing:
        runner.site = runner.folder / "build" / "site"
    rest = [part for part in chosen if part.needs_package]
    pool = ThreadPoolExecutor(2 if runner.dry_run else 1)
    try:
        run = (lambda part: Outcome("not run", missing)) if missing else runner.run
        yield from zip(rest, pool.map(run, rest), strict=True)
    finally:
        runner.stopped.set()
        pool.shutdown(cancel_futures=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Builds, tests and measures gpucomm on a GPU.", allow_abbrev=False)
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the results, written again after each part")
    parser.add_argument("--parts", type=parts, default=names, help="default: all of " + ",".join(names))
    parser.add_argument("--budget-s", type=float, default=290.0, help="what does not fit is not run (default 290)")
    parser.add_argument("--installed", action="store_true", help="build nothing: take the gpucomm that is importable")
    parser.add_argument("--nccl", type=library, metavar="LIBNCCL", help="an NCCL to use in the place of torch's")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: stand-ins, tiny sizes, no measurement")
    return parser


def parts(text: str) -> list[str]:
    known = [part.name for part in PARTS]
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"part {name!r}: expected some of {','.join(known)}")
    return text.split(",")


def library(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: expected the path of a libnccl.so.2")
    return str(Path(text).resolve())


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """Of the checkout; with "+" if its files differ from it. None where there is no git."""
    with contextlib.suppress(OSError):
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
        if head.returncode == 0:
            return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    return None


if __name__ == "__main__":
    sys.exit(main())
