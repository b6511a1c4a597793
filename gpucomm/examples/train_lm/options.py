"""The command line, and what a run is made of."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from gpucomm.examples.train_lm.errors import JobError
from gpucomm.examples.train_lm.model import PRESETS, Shape

RUN_FILE = "run.json"
# A resumed run keeps everything that decides its numbers; these it may change.
_FREE_ON_RESUME = {"steps", "eval_every", "checkpoint_every", "sample_length", "transport", "progress"}


@dataclass(frozen=True)
class Settings:
    """What a run is made of; the same on every rank, and kept in the run folder for --resume."""

    out: str
    preset: str = "small"
    nproc: int = 2
    steps: int = 300
    batch_size: int = 4
    block_size: int = 128
    lr: float = 2e-3
    accumulate: int = 1
    clip: float = 1.0
    eval_every: int = 50
    checkpoint_every: int = 100
    data: str | None = None
    seed: int = 0
    sample_length: int = 300
    transport: str = "auto"
    compare: bool = False
    progress: bool = True
    resume: bool = False
    text_digest: str = ""

    @property
    def shape(self) -> Shape:
        return replace(PRESETS[self.preset], block_size=self.block_size)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise JobError(message)


def parse(argv: Sequence[str], world_size: int | None = None) -> Settings:
    """The settings of a command line, and on --resume of the run it continues; the launcher's world size, if there is
    one, stands for --nproc. Raises JobError."""
    given = vars(_parser().parse_args(argv))
    if world_size is not None and given.setdefault("nproc", world_size) != world_size:
        raise JobError(f"--nproc {given['nproc']}: the launcher has started {world_size} ranks")
    if "data" in given:
        given["data"] = str(Path(given["data"]).absolute())  # a resumed run may be started elsewhere
    resumed = given.pop("resume", None)
    if resumed is not None:
        return _continued(Path(resumed), given)
    preset = given.get("preset", Settings.preset)
    given.setdefault("block_size", PRESETS[preset].block_size)
    given.setdefault("out", time.strftime(f"runs/train_lm-{preset}-%Y%m%d-%H%M%S"))
    return Settings(**given)


def _continued(folder: Path, given: dict[str, Any]) -> Settings:
    path = folder / RUN_FILE
    try:
        before = Settings(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise JobError(f"--resume {folder}: no run there ({path} is missing)") from None
    except (OSError, ValueError, TypeError) as error:
        raise JobError(f"--resume {folder}: {path} is not readable ({error})") from None
    if before.preset not in PRESETS:
        raise JobError(f"--resume {folder}: {path} has an unknown preset, {before.preset!r}")
    if given.get("compare") or before.compare:
        raise JobError(f"--resume {folder}: a comparison with stock DDP cannot be continued")
    if given.get("out", before.out) != before.out:
        raise JobError(f"--resume {folder}: continues in its own folder, so --out {given['out']} cannot be served")
    for name, value in given.items():
        if name not in _FREE_ON_RESUME and value != getattr(before, name):
            option = "--" + name.replace("_", "-")
            raise JobError(f"--resume {folder}: the run has {option} {getattr(before, name)}, not {value}")
    return replace(before, **{**given, "out": str(folder), "resume": True})


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m gpucomm.examples.train_lm",
        description="Train a byte-level GPT on text, data-parallel over --nproc ranks of this machine.",
        argument_default=argparse.SUPPRESS,  # what is not given stays out, so that --resume knows the difference
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--preset", choices=PRESETS, help="about 1, 3, 10 and 124 million parameters (default small)")
    option("--nproc", type=_count, help="ranks to start; under torchrun its own number counts (default 2)")
    option("--steps", type=_count, help="training steps in all (default 300)")
    option("--batch-size", type=_count, help="blocks per rank and micro-batch (default 4)")
    option("--block-size", type=_count, help="bytes of context (default: the preset's)")
    option("--lr", type=_positive, help="highest learning rate (default 2e-3)")
    option("--accumulate", type=_count, help="micro-batches per step (default 1)")
    option("--clip", type=_positive, help="bound on the gradients' 2-norm (default 1)")
    option("--eval-every", type=_count, help="steps between held-out losses (default 50)")
    option("--checkpoint-every", type=_count, help="steps between checkpoints (default 100)")
    option("--data", metavar="FILE_OR_FOLDER", help="text to train on (default: this Python's standard library)")
    option("--out", metavar="FOLDER", help="run folder, new (default runs/train_lm-PRESET-TIME)")
    option("--resume", metavar="FOLDER", help="continue the run in this folder, bitwise as if it had not stopped")
    option("--seed", type=_natural, help="of weights and batches (default 0)")
    option("--sample-length", type=_natural, help="bytes of text to generate at the end; 0 for none (default 300)")
    option("--transport", choices=["auto", "shm", "c10d"], help="gpucomm's transport (default auto)")
    option("--compare", action="store_true", help="train a second replica with stock DDP, in turns, and compare")
    option("--no-progress", dest="progress", action="store_false", help="no progress bar, and no lines off a terminal")
    return parser


def _count(text: str) -> int:
    return _whole_number(text, 1)


def _natural(text: str) -> int:
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not (least <= value < 2**63):
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to 2^63 - 1, got {text}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value
