"""Where one process of a part stands."""

from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
ROOT = BENCH.parent


@dataclass(frozen=True)
class Place:
    """folder: of the part, empty at first, for all its ranks. dry_run: stand-ins for the GPU, and sizes for them.

    left_s: what of the part's time is left for what it starts in turn.
    """

    rank: int
    size: int
    folder: Path
    dry_run: bool
    left_s: float
