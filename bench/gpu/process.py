"""One process of a part: python -m gpu.process MODULE --folder ... (bench/ on the path)."""

import argparse
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from gpu.parts import NotRun
from gpu.place import Place
from gpu.report import Report

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("module", help="of a part")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--left-s", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive the thread that started it
    faulthandler.dump_traceback_later(args.left_s, file=sys.stderr)  # what a part that is ended was at
    report = Report(args.folder / f"report_{args.rank}")
    try:
        module = importlib.import_module(args.module)
        module.run(Place(args.rank, args.size, args.folder, args.dry_run, args.left_s), report)
        report.end("done")
    except NotRun as reason:
        report.end("not run", str(reason))
    except BaseException as error:
        traceback.print_exc()
        report.end("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: threads of process groups may wait there for what a dead peer owes them.
    os._exit(code)
