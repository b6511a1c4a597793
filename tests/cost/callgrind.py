"""What callgrind has counted: instructions by function, and of calls between functions, from one of its dumps."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Function(NamedTuple):
    object: str  # the file that it lies in, "???" where valgrind knows none
    name: str


class Call(NamedTuple):
    caller: Function
    callee: Function


@dataclass
class Profile:
    own: Counter[Function] = field(default_factory=Counter)  # instructions, without what a function calls
    inclusive: Counter[Call] = field(default_factory=Counter)  # with all that came of the calls
    calls: Counter[Call] = field(default_factory=Counter)  # how many


def read(path: Path) -> Profile:
    """A dump that was made with --dump-line=no (https://valgrind.org/docs/manual/cl-format.html)."""
    profile, names = Profile(), {}

    def named(kind: str, text: str) -> str:
        number, name = re.fullmatch(r"\((\d+)\)(?: (.*))?", text).groups()
        return names.setdefault((kind, number), name)

    here: dict[str, str] = {}
    called, times = None, 0
    for line in path.read_text().splitlines():
        key, _, value = line.partition("=")
        if key in ("ob", "fn", "cob", "cfn"):
            here[key] = named(key[-2:], value)
        elif key == "calls":
            # Without an object of its own it is the caller's.
            called, times = Function(here.pop("cob", here["ob"]), here["cfn"]), int(value.split()[0])
        elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
            function, cost = Function(here["ob"], here["fn"]), int(line.split()[1])
            if called is None:
                profile.own[function] += cost
            else:
                profile.inclusive[Call(function, called)] += cost
                profile.calls[Call(function, called)] += times
                called = None
    return profile
