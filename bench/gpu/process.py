"""One process of a part: python -m gpu.process PART --folder ... (bench/ on the path)."""

import argparse
import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

from gpu.parts import NotRun, part_named
from gpu.place import Place
from gpu.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("part")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--left-s", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.left_s, file=sys.stderr)  # what a part that is ended was at
    report = Report(args.folder / f"report_{args.rank}")
    try:
        module = importlib.import_module(f"gpu.{part_named(args.part).module}")
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
