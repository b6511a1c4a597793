"""NVIDIA's own headers and libraries, for tests that hold ours against them.

Looked for in a CUDA toolkit (CUDA_HOME, else /usr/local/cuda), in wheels beside the running Python's packages, in
build/nvidia/cu12 and cu13, which `make test-nvidia` fills, and in the folders that GPUCOMM_TEST_WHEELS names. None of
it needs a GPU. What is missing skips its test; with GPUCOMM_TEST_NVIDIA=required it fails it, a toolkit excepted.
"""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Wheel:
    """An installed distribution. folder: where its files lie under the names that RECORD gives."""

    name: str
    version: str
    folder: Path

    def file(self, ending: str) -> Path:
        """The one whose path ends so; a library is named whole, `lib/libnccl.so.2`."""
        found = [path for path in self._paths() if path.as_posix().endswith("/" + ending)]
        assert len(found) == 1, f"{self.name} {self.version} holds {found} for {ending}"
        return self.folder / found[0]

    def _paths(self) -> Iterable[Path]:
        (distribution,) = (d for d in _distributions(self.folder) if d.metadata["Name"] == self.name)
        return [Path(str(path)) for path in distribution.files or ()]

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"


def folders() -> list[Path]:
    extra = os.environ.get("GPUCOMM_TEST_WHEELS", "").split(os.pathsep)
    places = [
        sysconfig.get_paths()["purelib"],
        ROOT / "build/nvidia/cu12",
        ROOT / "build/nvidia/cu13",
        *filter(None, extra),
    ]
    return [Path(place) for place in places]


def _distributions(folder: Path) -> Iterable[metadata.Distribution]:
    return metadata.distributions(path=[str(folder)])


def wheels(*names: str) -> list[Wheel]:
    """Every copy of the named distributions, in the order of the names; one of each version."""
    found = {}
    for folder in folders():
        for distribution in _distributions(folder):
            name = distribution.metadata["Name"]
            if name in names:
                found.setdefault((names.index(name), distribution.version), Wheel(name, distribution.version, folder))
    return [found[key] for key in sorted(found)]


def toolkit() -> Path | None:
    """The CUDA toolkit's folder, None if there is none."""
    folder = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    return folder if (folder / "include/cuda.h").exists() else None


def no_toolkit(what: str) -> NoReturn:
    """Skips the test, for want of what only a toolkit has."""
    pytest.skip(f"{what} is not here; it comes with a CUDA toolkit (CUDA_HOME, /usr/local/cuda)")


def missing(what: str) -> NoReturn:
    """Skips the test, or fails it where NVIDIA's files are required."""
    if os.environ.get("GPUCOMM_TEST_NVIDIA") == "required":
        pytest.fail(f"{what} is not here")
    pytest.skip(f"{what} is not here: `make test-nvidia` fetches it")


def each(parameter: str, found: list, what: str) -> pytest.MarkDecorator:
    """Parametrizes a test over what was found; over None, for which the test calls missing(), if nothing was."""
    return pytest.mark.parametrize(parameter, found or [None], ids=[str(one) for one in found] or [f"no {what}"])
