"""Checks of the trainer's arguments; each error names the argument, its value, and what is accepted."""

from __future__ import annotations

import math
from typing import Any


def check_count(name: str, value: Any, minimum: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")
    return value


def check_positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")
    return float(value)


def check_callable(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{name}: expected a callable, got {value!r}")
    return value
