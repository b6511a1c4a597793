"""Records and tables: what was measured, on what machine, with which versions; statistics of a series of samples."""

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata

import torch


def machine() -> dict:
    """Processor model, cores this process may use, memory, size of the last-level cache where the system says."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "last_level_cache_bytes": _last_level_cache_bytes(),
        "arch": platform.machine(),
        "kernel": platform.release(),
    }


def versions() -> dict:
    """Versions of what is compared; None for what is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        from gpucomm.version import __version__ as ours  # not its metadata: it may run from a source tree

        found["gpucomm"] = ours
    except ImportError:
        found["gpucomm"] = None
    try:
        found["mpi4py"] = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        found["mpi4py"] = None
    return found


def spread(samples: torch.Tensor) -> dict:
    """Median, 10th and 90th percentile and range of a one-dimensional series, all in its unit."""
    values = samples.double()
    p10, median, p90 = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"median": median, "p10": p10, "p90": p90, "min": values.min().item(), "max": values.max().item()}


class Record:
    """Appends one JSON object a line to `path` (nowhere if None), each with machine and versions."""

    def __init__(self, path: str | None, **fixed):
        self._path = path
        self._fixed = fixed | {"machine": machine(), "versions": versions()}

    def write(self, **fields) -> None:
        if self._path is None:
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields | self._fixed) + "\n")


class Table:
    """Prints rows as they come, under headings of fixed width: `columns` maps a heading to its width."""

    def __init__(self, columns: dict[str, int]):
        self._columns = columns

    def head(self) -> None:
        print("  ".join(name.rjust(width) for name, width in self._columns.items()), flush=True)

    def row(self, cells: Sequence[object]) -> None:
        if len(cells) != len(self._columns):
            raise ValueError(f"a row has {len(cells)} cells, the table {len(self._columns)} columns")
        widths = self._columns.values()
        print("  ".join(show(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


def show(cell: object) -> str:
    """A cell as text: floats with three or four significant digits, None as a dash."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.1f}"
    return str(cell)


def size_text(numbytes: int) -> str:
    """4096 -> '4K', 1048576 -> '1M', 12 -> '12'."""
    for factor, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if numbytes >= factor and numbytes % factor == 0:
            return f"{numbytes // factor}{letter}"
    return str(numbytes)


def parse_size(text: str) -> int:
    """The number of bytes that '4', '64K', '1M' or '1G' stands for; ValueError otherwise."""
    factors = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    factor = factors.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isascii() or not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"size {text!r}: expected a positive number of bytes such as 4, 64K, 1M or 1G")
    return int(digits) * factor


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # no /proc: the platform module's word will do
    return platform.processor() or "unknown"


def _last_level_cache_bytes() -> int | None:
    base = "/sys/devices/system/cpu/cpu0/cache"
    if not os.path.isdir(base):
        return None
    sizes = []
    for index in sorted(name for name in os.listdir(base) if name.startswith("index")):
        with open(f"{base}/{index}/size", encoding="ascii") as file:
            sizes.append(parse_size(file.read().strip()))
    return max(sizes, default=None)
