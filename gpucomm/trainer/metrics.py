"""The run's metrics as JSON lines: one object per line, flushed at once, so that a killed run keeps what it wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gpucomm.trainer.files import write_atomically


class MetricsFile:
    """Appends records to `path`, which it opens on the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({key: _strict(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drops the records after `step`: a run resumed from there writes them again."""
        self.close()
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the line that was being written when the run was killed
                break
            if record["step"] <= step:
                kept.append(line)
        write_atomically(self._path, lambda file: file.write("".join(kept).encode()))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity; as strings they survive every reader, and float() understands them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
