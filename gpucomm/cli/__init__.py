"""The command `gpucomm`, also `python -m gpucomm`. A subcommand is a file of this folder."""

import sys
from collections.abc import Callable, Sequence

from gpucomm.cli import run
from gpucomm.version import __version__

# Name, what it is for, and what takes its arguments and returns the exit status.
SUBCOMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "run": (
        "start a script on several ranks, as torchrun does; --patch: with gpucomm's DistributedDataParallel",
        run.main,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; 2 for wrong usage, said in one line on stderr."""
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"gpucomm {__version__}")
        return 0
    if name not in SUBCOMMANDS:
        kind = "option" if name.startswith("-") else "subcommand"
        print(f"gpucomm: unknown {kind} {name!r}: one of {', '.join(SUBCOMMANDS)}, --help, --version", file=sys.stderr)
        return 2
    return SUBCOMMANDS[name][1](arguments)


def _help() -> str:
    lines = [f"  {name:<8}{purpose}" for name, (purpose, _) in SUBCOMMANDS.items()]
    return "\n".join(["usage: gpucomm SUBCOMMAND ...", "", "Subcommands, each with a --help of its own:", *lines])
