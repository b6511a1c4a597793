"""`gpucomm run`: torchrun; with --patch our DistributedDataParallel is in the place of torch's in unedited scripts.

The ranks are torchrun's, in every respect. With --patch their PYTHONPATH begins with the folder patch/, whose
sitecustomize.py Python runs at start-up. So the user's program is run by Python itself, as it always is, and processes
that it starts are patched too.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.errors import record

from gpucomm.install import install
from gpucomm.world import TRANSPORTS, environment

_PATCH = Path(__file__).parent / "patch"

# Values that torchrun would take apart only later, and end with a traceback.
_PARTS: dict[str, Callable[[str], Any]] = {
    "nproc_per_node": torchrun.determine_local_world_size,
    "nnodes": torchrun.parse_min_max_nnodes,
    "redirects": Std.from_str,
    "tee": Std.from_str,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str]) -> int:
    """Runs what the arguments say, as torchrun does; raises what it raises where ranks fail."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(args, parser)
    options = argv[: len(argv) - len(args.training_script_args) - 1]
    args.standalone = args.standalone or not _names_rendezvous(args, options)
    variables = {"GPUCOMM_TRANSPORT": args.transport}
    if args.patch:
        install()  # for ranks that are forked from here (--run-path)
        variables["PYTHONPATH"] = str(_PATCH)
    with environment(variables, prepend={"PYTHONPATH"}):
        record(torchrun.run)(args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpucomm run",
        description="Starts a script on several ranks: torchrun, with its options. Where they name no rendezvous, "
        "--standalone is meant.",
        parents=[torchrun.get_args_parser()],
        add_help=False,  # the parent's
    )
    ours = parser.add_argument_group("gpucomm")
    ours.add_argument(
        "--patch",
        action="store_true",
        help="torch.nn.parallel.DistributedDataParallel is gpucomm's in every rank, and in the processes it starts",
    )
    ours.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="how gradients travel (GPUCOMM_TRANSPORT)",
    )
    return parser


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name, parts in _PARTS.items():
        value = getattr(args, name)
        try:
            parts(value)
        except (ValueError, RuntimeError, KeyError) as error:
            parser.error(f"argument --{name.replace('_', '-')} is {value!r}: {error}")
    if args.nproc_per_node.lstrip("-").isdigit() and int(args.nproc_per_node) < 1:
        parser.error(f"argument --nproc-per-node is {args.nproc_per_node!r}: accepted is 1 or more")
    if problem := _missing(args):
        parser.error(problem)


def _missing(args: argparse.Namespace) -> str | None:
    """What is wrong with the script, None if it can be started."""
    script = args.training_script
    if args.module:
        top = script.split(".")[0]
        # `python -m` looks into the current folder too.
        if not top.isidentifier() or (find_spec(top) is None and PathFinder.find_spec(top, [os.getcwd()]) is None):
            return f"there is no module {script!r}"
    elif args.no_python:
        if shutil.which(script) is None:
            return f"there is no program {script!r}"
    elif not Path(script).exists():
        return f"there is no script {script!r}"
    return None


def _names_rendezvous(args: argparse.Namespace, options: Sequence[str]) -> bool:
    """Whether options, or torchrun's own variables (PET_*), say where ranks meet."""
    return (
        any(option.startswith(("--rdzv", "--master", "--node-rank", "--node_rank")) for option in options)
        or torchrun.parse_min_max_nnodes(args.nnodes)[1] > 1
        or (args.rdzv_backend, args.rdzv_endpoint, args.master_addr) != ("static", "", "127.0.0.1")
        or args.master_port not in (None, 29500)
    )
