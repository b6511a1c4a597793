"""What a process of a part hands back, as it comes: lines of JSON in a file, so that one that is killed leaves them."""

import json
from pathlib import Path


class Report:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", encoding="utf-8")

    def row(self, name: str, value: float | bool, **detail: object) -> None:
        """The value of a row, in its unit; detail: what it was made of."""
        self._write({"row": name, "value": value, "detail": detail})

    def facts(self, **facts: object) -> None:
        """What belongs to no row."""
        self._write({"facts": facts})

    def end(self, status: str, reason: str = "") -> None:
        self._write({"status": status, "reason": reason})

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict]:
    """The whole lines of a report; the last may have been cut short."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
