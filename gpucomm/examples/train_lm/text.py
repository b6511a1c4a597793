"""Text for training: where it comes from, and the batches drawn from it.

A batch is determined by (seed, rank, position) alone, so ranks see different text, and a resumed run sees exactly what
it would have seen.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from gpucomm.examples.train_lm.errors import JobError

HELD_OUT_SHARE = 0.05
# Not the standard library; or tests; or tables of character codes, a tenth of all bytes, that teach nothing but digits.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings"}

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Text:
    """Bytes, uint8 [count], split into a part to train on and a held-out end."""

    train: torch.Tensor
    held_out: torch.Tensor
    digest: str
    source: str

    @property
    def byte_count(self) -> int:
        return len(self.train) + len(self.held_out)


def read_text(path: str | None, block_size: int) -> Text:
    """The text of a file, of all text files in a folder (in the order of their names), or by default of the running
    interpreter's standard library. Raises JobError if there is no text, or less than the blocks need."""
    if path is None:
        source, files = "the standard library's sources", _standard_library()
    else:
        source, files = path, _files_in(Path(path))
    content = b"\n".join(_contents(files, must_be_text=path is not None and Path(path).is_file()))
    if not content.strip():
        raise JobError(f"--data {source}: no readable text in {'it' if len(files) == 1 else f'its {len(files)} files'}")

    held_out_count = max(block_size + 1, int(len(content) * HELD_OUT_SHARE))
    train_count = len(content) - held_out_count
    if train_count < block_size + 1:
        raise JobError(
            f"--data {source}: {len(content)} bytes are too few, training and held-out text "
            f"each need a block of {block_size} bytes and one more"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return Text(tokens[:train_count], tokens[train_count:], digest, source)


class TrainBatches:
    """Maps a position to a batch of random blocks of the training text, other ones on every rank."""

    def __init__(self, text: Text, batch_size: int, block_size: int, seed: int, rank: int) -> None:
        self._text = text.train
        self._batch_size = batch_size
        self._block_size = block_size
        self._seed = seed
        self._rank = rank

    def __call__(self, position: int) -> Batch:
        generator = torch.Generator().manual_seed(_mixed(self._seed, self._rank, position))
        starts = torch.randint(len(self._text) - self._block_size, (self._batch_size,), generator=generator)
        return _blocks(self._text, starts, self._block_size)


def held_out_batches(
    text: Text, batch_size: int, block_size: int, rank: int, world_size: int, at_most: int = 8
) -> list[Batch]:
    """This rank's batches of evenly spaced held-out blocks; every rank has equally many."""
    room = len(text.held_out) - block_size
    count = min(at_most * world_size, max(1, room // (batch_size * block_size)))
    per_rank = max(1, count // world_size)
    starts = torch.linspace(0, room - 1, per_rank * world_size * batch_size, dtype=torch.float64).long()
    mine = starts.view(per_rank, world_size, batch_size)[:, rank]
    return [_blocks(text.held_out, batch_starts, block_size) for batch_starts in mine]


def _mixed(*numbers: int) -> int:
    """A 63-bit seed from several numbers: neighbours get unrelated generators."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _blocks(text: torch.Tensor, starts: torch.Tensor, block_size: int) -> Batch:
    """(inputs, targets), int64 [batch, block_size]: targets are the inputs one byte later."""
    tokens = text[starts[:, None] + torch.arange(block_size + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise JobError(f"{root}: this interpreter has no standard-library sources, give a text with --data")
    return _in_order(files, root)


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise JobError(f"--data {path}: no such file or folder")
    files = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise JobError(f"--data {path}: the folder has no files")
    return _in_order(files, path)


def _in_order(files: list[Path], root: Path) -> list[Path]:
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _contents(files: list[Path], must_be_text: bool) -> list[bytes]:
    """The files that are text; the others are left out, or refused."""
    contents = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise JobError(f"--data {file}: {error.strerror}") from None
        if _is_text(content):
            contents.append(content)
        elif must_be_text:
            raise JobError(f"--data {file}: not text (expected UTF-8)")
    return contents


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
