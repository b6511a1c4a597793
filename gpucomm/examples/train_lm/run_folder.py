"""The run folder: run.json (the settings), metrics.jsonl, checkpoints/."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from gpucomm.examples.train_lm.errors import JobError
from gpucomm.examples.train_lm.model import GPT
from gpucomm.examples.train_lm.options import RUN_FILE, Settings
from gpucomm.examples.train_lm.text import Text
from gpucomm.trainer import CheckpointError
from gpucomm.trainer.checkpoint import CheckpointFolder, check_model
from gpucomm.trainer.files import write_atomically


def check_free(settings: Settings) -> None:
    """Raises JobError if the folder holds a run or cannot be created; changes nothing."""
    folder = Path(settings.out)
    if folder.is_dir() and any(folder.iterdir()):
        hint = f"; continue it with --resume {folder}" if (folder / RUN_FILE).exists() else ""
        raise JobError(f"--out {folder}: is not empty{hint}")
    ancestor = folder
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise JobError(f"--out {folder}: {ancestor} is not a folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise JobError(f"--out {folder}: {ancestor} is not writable")


def create(settings: Settings) -> None:
    """Creates the folder with its run.json. Raises JobError, if it holds a run too."""
    check_free(settings)
    folder = Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(asdict(settings), indent=1).encode()
        write_atomically(folder / RUN_FILE, lambda file: file.write(content))
    except OSError as error:
        raise JobError(f"--out {folder}: cannot be written ({error.strerror})") from None


def check_resumable(settings: Settings, text: Text) -> None:
    """Raises JobError unless there is a sound checkpoint of these settings, of the same text, with steps left to do."""
    folder = Path(settings.out)
    if text.digest != settings.text_digest:
        raise JobError(f"--resume {folder}: the run was trained on another text than {text.source} holds now")
    model = GPT(settings.shape)
    checkpoints = [CheckpointFolder(folder / "checkpoints", rank, settings.nproc) for rank in range(settings.nproc)]
    try:
        step = checkpoints[0].latest()
        if step is None:
            raise JobError(f"--resume {folder}: it has no complete checkpoint")
        for of_rank in checkpoints:
            shared, _ = of_rank.load(step)
        check_model(model, shared["model"])
    except CheckpointError as error:
        raise JobError(f"--resume {folder}: {error}") from None
    if step >= settings.steps:
        raise JobError(f"--resume {folder}: the run is at step {step} already, give more --steps than that")
