"""The results as one JSON document, written again after each part, and as a table."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpu.parts import Part
from gpu.rows import Row
from gpu.runner import Outcome

_WIDTHS = (76, 14, 22, 5)


@dataclass
class Results:
    """head: what is the same for all parts. path: the file, or None.

    What a dry run yields is no measurement: it is kept apart (`dry_run_value`) and meets no bar.
    """

    head: dict
    path: Path | None
    dry_run: bool
    parts: list[dict] = field(default_factory=list)

    def add(self, part: Part, outcome: Outcome) -> None:
        rows = [self._row(row, outcome) for row in part.rows]
        entry = {"name": part.name, "what": part.what, "status": outcome.status, "reason": outcome.reason}
        entry |= {"seconds": round(outcome.seconds, 1), "limit_s": round(outcome.limit_s, 1), "rows": rows}
        entry |= {"facts": outcome.facts} if outcome.facts else {}
        entry |= {"output": outcome.output} if outcome.output else {}
        self.parts.append(entry)
        self.write()
        for line in self.lines(entry):
            print(line, flush=True)

    def _row(self, row: Row, outcome: Outcome) -> dict:
        value = outcome.values.get(row.name)
        entry = {"name": row.name, "what": row.what, "unit": row.unit, "bar": row.bar}
        if self.dry_run:
            return entry | {"value": None, "met": None, "dry_run_value": value}
        met = None if value is None else row.met(value)
        return entry | {"value": value, "met": met, "detail": outcome.details.get(row.name, {})}

    def write(self) -> None:
        if self.path is None:
            return
        text = json.dumps(self.head | {"parts": self.parts}, indent=1) + "\n"
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path)

    def lines(self, entry: dict) -> Iterable[str]:
        """A part as lines of the table."""
        status = entry["status"] + (f": {entry['reason'].splitlines()[0]}" if entry["reason"] else "")
        yield ""
        yield f"{entry['name']}: {entry['what']} ({entry['seconds']:.1f} s) {status}"
        for row in entry["rows"]:
            yield _line(("  " + row["what"], self._value_text(row), row["bar"], _verdict(row))).rstrip()
        for rank, text in entry.get("output", {}).items():
            yield f"  the end of what rank {rank} wrote:"
            yield from ("    " + line for line in text.splitlines()[-12:])

    def _value_text(self, row: dict) -> str:
        value = row["dry_run_value"] if self.dry_run else row["value"]
        if value is None:
            return "-"
        if self.dry_run:
            return "dry run"
        if isinstance(value, bool):
            return "yes" if value else "no"
        is_whole = math.isfinite(value) and (abs(value) >= 1000 or value == int(value))
        return f"{value:,.0f}" if is_whole else f"{value:.3g}"

    def summary(self) -> str:
        rows = [row for part in self.parts for row in part["rows"]]
        met, short = (sum(row["met"] is verdict for row in rows) for verdict in (True, False))
        count = {status: sum(part["status"] == status for part in self.parts) for status in _STATUSES}
        parts = ", ".join(f"{number} {status}" for status, number in count.items() if number)
        if self.dry_run:
            return f"dry run over stand-ins, nothing was measured; parts: {parts}"
        return f"bars met: {met}, short: {short}; parts: {parts}"

    def succeeded(self) -> bool:
        """Whether every part was done, or could not be here, and no bar was missed."""
        short = any(row["met"] is False for part in self.parts for row in part["rows"])
        broken = any(part["status"] in ("failed", "timed out") for part in self.parts)
        holes = any(_missing(row) for part in self.parts if part["status"] == "done" for row in part["rows"])
        return not short and not broken and not holes


_STATUSES = ("done", "failed", "timed out", "not run")


def _missing(row: dict) -> bool:
    return row["value"] is None and row.get("dry_run_value") is None


def _verdict(row: dict) -> str:
    return {True: "met", False: "SHORT", None: ""}[row["met"]]


def _line(cells: tuple[str, str, str, str]) -> str:
    what, value, bar, verdict = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return f"{what} {value.strip():>{_WIDTHS[1]}}  {bar}{verdict}"
