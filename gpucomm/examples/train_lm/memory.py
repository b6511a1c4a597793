"""Does the run fit? An estimate of what it needs against what the machine and the container allow."""

from __future__ import annotations

from pathlib import Path

from gpucomm.examples.train_lm.errors import JobError
from gpucomm.examples.train_lm.model import Shape
from gpucomm.examples.train_lm.options import Settings

PROCESS_BYTES = 300 << 20  # an interpreter with torch, before the first tensor
# Per parameter, fp32: weight, gradient in its bucket, two Adam moments, and a gradient before it is packed.
BYTES_PER_PARAMETER = 5 * 4
# Floats per token and unit of width that a block keeps for backward: two norms, qkv, attention, two residuals, and the
# MLP's inner layer before and after GELU; measured peaks are a little below.
FLOATS_PER_BLOCK = 20


def check_fits(settings: Settings, text_bytes: int) -> None:
    """Raises JobError if all ranks together need more memory than is available."""
    per_rank = bytes_per_rank(settings, text_bytes)
    needed, available = settings.nproc * per_rank, available_bytes()
    if needed > available:
        fitting = available // per_rank
        raise JobError(
            f"--preset {settings.preset} --batch-size {settings.batch_size} --nproc {settings.nproc} needs about "
            f"{_gib(needed)} of memory, {_gib(per_rank)} per rank; {_gib(available)} is available, enough for "
            f"{f'--nproc {fitting}' if fitting else 'none'}"
        )


def bytes_per_rank(settings: Settings, text_bytes: int) -> int:
    shape = settings.shape
    tokens = settings.batch_size * shape.block_size
    replicas = 2 if settings.compare else 1  # they take turns, so activations count once
    logits = 3 * shape.vocabulary  # and their softmax, and their gradient
    activations = 4 * tokens * (FLOATS_PER_BLOCK * shape.layers * shape.width + logits)
    return PROCESS_BYTES + replicas * BYTES_PER_PARAMETER * parameter_count(shape) + activations + text_bytes


def parameter_count(shape: Shape) -> int:
    """Exactly what GPT(shape) has."""
    width = shape.width
    tables = (shape.vocabulary + shape.block_size) * width
    norm = 2 * width
    attention = (width + 1) * 3 * width + (width + 1) * width
    mlp = (width + 1) * 4 * width + (4 * width + 1) * width
    return tables + shape.layers * (2 * norm + attention + mlp) + norm


def available_bytes(root: Path = Path("/")) -> int:
    """The least of the machine's available memory and what is left of every limit on this process's control groups."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    left = [int(meminfo["MemAvailable"].split()[0]) << 10]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2
            left += _left_below(root / "sys/fs/cgroup", name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left_below(root / "sys/fs/cgroup/memory", name, *names)
    return max(0, min(left))


def _left_below(mount: Path, name: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """What each group from `name` up to the mount leaves. In a container the group's own path may not exist here."""
    left = []
    folder = mount / name.lstrip("/")
    while True:
        try:
            limit_text = (folder / limit).read_text().strip()
            if limit_text != "max":
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / usage).read_text()) - int(statistics.get(reclaimable, 0))
                left.append(int(limit_text) - used)
        except FileNotFoundError:
            pass
        if folder == mount:
            return left
        folder = folder.parent


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
