"""How far training is: a tqdm bar on a terminal, a line now and then elsewhere; and lines that do not break the bar."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

LINE_EVERY_S = 10.0


class Progress:
    """Shows the way from `done` to `total` steps: a bar on stderr if that is a terminal, else a line on stdout at most
    every LINE_EVERY_S. Nothing unless `shown`."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self._total = total
        self._done = done
        self._shown = shown
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)
        self._figures: dict[str, str] = {}
        self._told_at = time.monotonic()
        self._told_steps = done

    def advance(self, **figures: str) -> None:
        """One step more. figures: the newest ones, kept until others come."""
        self._done += 1
        self._figures.update(figures)
        if self._bar is not None:
            if figures:
                self._bar.set_postfix(self._figures, refresh=False)
            self._bar.update()
        elif self._shown and time.monotonic() - self._told_at >= LINE_EVERY_S:
            self._tell()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _tell(self) -> None:
        now = time.monotonic()
        left_s = (now - self._told_at) / (self._done - self._told_steps) * (self._total - self._done)
        figures = "".join(f"   {name} {value}" for name, value in self._figures.items())
        print_line(f"step {self._done:>5} of {self._total}{figures}   about {left_s:.0f} s left")
        self._told_at, self._told_steps = now, self._done


def print_line(line: str) -> None:
    """Prints to stdout at once, above a bar if there is one."""
    tqdm.write(line)
    sys.stdout.flush()
