"""Checkpoints: what all ranks share in one file, what each rank has alone in another, and no communication.

    folder/step-00000100/shared.pt    model, optimizer, scheduler (written by rank 0)
    folder/step-00000100/rank-1.pt    that rank's generators, place in the data, and buffers

Written by torch.save rather than torch.distributed.checkpoint: in plain data parallelism every rank holds the whole
state, so there is nothing to shard; and its collective save would put communication into the trainer.

[Note: complete checkpoints] Each file is written atomically, and a checkpoint counts only once the files of all ranks
are there. Rank 0 deletes what is older than the previous checkpoint. That is safe without a barrier: it can be saving
step k only if every peer took part in the iterations up to k, so every peer has finished saving the previous one.
"""

from __future__ import annotations

import pickle
import random
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from gpucomm import cuda
from gpucomm.trainer.files import write_atomically


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the run; the message names the file and the difference."""


class CheckpointFolder:
    """The checkpoints of one run, seen from one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size

    def __str__(self) -> str:
        return str(self._folder)

    def save(self, step: int, shared: dict[str, Any], local: dict[str, Any]) -> None:
        """Writes this rank's part; `shared` is written by rank 0 only. Blocks until it is on disk."""
        target = self._path(step)
        target.mkdir(parents=True, exist_ok=True)
        local = {"world_size": self._world_size, **local}
        write_atomically(target / f"rank-{self._rank}.pt", lambda file: torch.save(local, file))
        if self._rank == 0:
            write_atomically(target / "shared.pt", lambda file: torch.save(shared, file))
        self._delete_before(step)

    def latest(self) -> int | None:
        """The newest step whose checkpoint is complete, or None. Raises CheckpointError if that cannot be told."""
        for step in reversed(self._steps()):
            try:
                if self._is_complete(step):
                    return step
            except CheckpointError as error:
                raise self._with_way_back(error, step) from error
        return None

    def load(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, local) of this rank, on the CPU."""
        local_path = self._path(step) / f"rank-{self._rank}.pt"
        saved_world_size = len(list(self._path(step).glob("rank-*.pt")))
        if saved_world_size != self._world_size:
            raise CheckpointError(
                f"{self._path(step)}: written by {saved_world_size} ranks, this run has {self._world_size}; "
                "an exact resume needs the same number"
            )
        try:
            return load_file(self._path(step) / "shared.pt"), load_file(local_path)
        except CheckpointError as error:
            raise self._with_way_back(error, step) from error

    def discard_after(self, step: int) -> None:
        """Deletes this rank's part of newer checkpoints, which no peer completed, and what a killed write left over."""
        own = [f"rank-{self._rank}.pt", *(["shared.pt"] if self._rank == 0 else [])]
        for name in own:
            for leftover in self._folder.glob(f"step-*/.{name}.*.partial"):
                leftover.unlink(missing_ok=True)
            for newer in self._steps():
                if newer > step:
                    (self._path(newer) / name).unlink(missing_ok=True)

    def _with_way_back(self, error: CheckpointError, damaged: int) -> CheckpointError:
        """The error of a damaged checkpoint, with what is left to do about it."""
        older = next((step for step in reversed(self._steps()) if step < damaged and self._is_intact(step)), None)
        if older is None:
            return CheckpointError(f"{error}; no older checkpoint is intact")
        return CheckpointError(f"{error}; step {older} is intact: delete {self._path(damaged)} to resume from there")

    def _is_intact(self, step: int) -> bool:
        """Whether it is complete and every file of it can be read."""
        try:
            for path in self._path(step).glob("*.pt"):
                load_file(path)
            return self._is_complete(step)
        except CheckpointError:
            return False

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        matches = (re.fullmatch(r"step-(\d+)", path.name) for path in self._folder.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)

    def _is_complete(self, step: int) -> bool:
        files = list(self._path(step).glob("rank-*.pt"))
        if not files or not (self._path(step) / "shared.pt").exists():
            return False
        world_size: int = load_file(files[0])["world_size"]
        return len(files) == world_size

    def _delete_before(self, step: int) -> None:
        """[Note: complete checkpoints]: keeps this one and the one before. Rank 0 removes whole folders."""
        if self._rank == 0:
            for old in [other for other in self._steps() if other < step][:-1]:
                shutil.rmtree(self._path(old), ignore_errors=True)


def load_file(path: Path) -> dict[str, Any]:
    """torch.load with every byte checked against the archive's checksums, which torch.load itself does not do."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path}: damaged, the checksum of its part {damaged} is wrong")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint file") from None
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a readable checkpoint ({reason})") from error
    return content


def check_model(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError with the first difference in names, shapes or dtypes between the model and the state."""
    expected = model.state_dict()
    for name in [*expected, *state]:
        if name not in state:
            raise CheckpointError(f"the checkpoint has no {name}, which the model needs")
        if name not in expected:
            raise CheckpointError(f"the checkpoint has {name}, which the model does not know")
        here, there = expected[name], state[name]
        if isinstance(here, torch.Tensor) and (here.shape, here.dtype) != (there.shape, there.dtype):
            raise CheckpointError(
                f"{name} is {here.dtype} {tuple(here.shape)} in the model, "
                f"{there.dtype} {tuple(there.shape)} in the checkpoint"
            )


def generator_states() -> dict[str, Any]:
    """The states of every generator that training draws from by default: Python's, torch's, NumPy's if it is loaded."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (of_gpus := cuda.generator_states()) is not None:
        states["cuda"] = of_gpus
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [str(name), keys.tolist(), *(float(x) if isinstance(x, float) else int(x) for x in rest)]
    return states


def restore_generators(states: dict[str, Any]) -> None:
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        cuda.restore_generators(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(states["numpy"]))
