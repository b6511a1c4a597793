"""The progress bar: tqdm on a terminal, nothing elsewhere; and lines that do not break it."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]


class ProgressBar:
    """A bar from `done` to `total` steps if `shown` and stderr is a terminal; otherwise every call does nothing."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def advance(self, **figures: str) -> None:
        if self._bar is not None:
            if figures:
                self._bar.set_postfix(figures, refresh=False)
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def print_line(line: str) -> None:
    """Prints to stdout at once, above a bar if there is one."""
    tqdm.write(line)
    sys.stdout.flush()
