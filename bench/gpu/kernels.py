"""The pack kernel beside a copy on the device, and beside stock DDP's copies of one tensor after the other.

512 MiB of gradients, as 16 large tensors and as 10,000 small ones. Bandwidths count what is read and what is written.
Stock DDP scales each gradient into its place by a launch of its own; here from Python, and once more as a CUDA graph,
which spares it what its launches cost the host: the bar counts against the faster of both.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpu.device import Gpu
from gpu.group import joined
from gpu.launch import Packing, load_kernels, sum_of
from gpu.parts import PACKED_PAIRS
from gpu.place import Place
from gpu.report import Report
from gpu.timing import interleaved, paired, spread

_BYTES = 512 << 20
_COUNTS = {"large": 16, "small": 10_000}
_TINY_BYTES = 96 << 10
_TINY_COUNTS = {"large": 3, "small": 520}  # more than one launch holds
_SCALE = 0.25
_ROUNDS = 20


def run(place: Place, report: Report) -> None:
    with joined(place) as ranks:
        gpu = ranks.gpu
        kernels = load_kernels()
        total_bytes, counts = (_TINY_BYTES, _TINY_COUNTS) if gpu.dry_run else (_BYTES, _COUNTS)
        right = True
        copies: list[float] = []
        for size, count in counts.items():
            for names in PACKED_PAIRS:
                of, to = (getattr(torch, name) for name in names)
                grads = gradients(gpu, total_bytes // of.itemsize // count, count, of)
                packing = Packing(kernels, grads, to, _SCALE)
                samples = measure(gpu, packing, total_bytes, stock=size == "small" and of == to == torch.float32)
                right = right and is_right(kernels, packing)
                share = paired(samples["ours"], samples["copy"], lambda a, b: 100 * a / b)
                report.row(f"{size}_{names[0]}_{names[1]}", share["median"], share=share, **all_of(samples))
                copies += samples["copy"]
                if "stock" in samples:
                    report_stock(report, samples)
                del grads, packing
        report.row("packed_right", right)
        report.row("copy", spread(copies)["median"], gb_s=spread(copies))


def gradients(gpu: Gpu, numel: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(numel, device=gpu.torch_device).to(dtype) for _ in range(count)]


def measure(gpu: Gpu, packing: Packing, total_bytes: int, stock: bool) -> dict[str, list[float]]:
    """GB/s of each arm, by round."""
    source = torch.randn(total_bytes // 4, device=gpu.torch_device)
    target = torch.empty_like(source)
    moved = sum(grad.nbytes for grad in packing.grads) + sum(slot.nbytes for slot in packing.slots())
    arms = {
        "copy": sampler(gpu, lambda: target.copy_(source), 2 * source.nbytes, 10),
        "ours": sampler(gpu, packing.pack, moved, 10),
    }
    if stock:
        each = stock_copies(packing)
        each()  # what is loaded on first use is not to be captured
        replay, _ = gpu.captured(each)
        arms["stock"] = sampler(gpu, each, moved, 1)
        arms["stock_graph"] = sampler(gpu, replay, moved, 1)
    return interleaved(arms, 2 if gpu.dry_run else _ROUNDS)


def sampler(gpu: Gpu, work: Callable[[], object], moved_bytes: int, ops: int) -> Callable[[], float]:
    def sample() -> float:
        gpu.synchronize()
        first = gpu.mark()
        for _ in range(ops):
            work()
        return ops * moved_bytes / gpu.us_between(first, gpu.mark()) / 1e3

    return sample


def stock_copies(packing: Packing) -> Callable[[], None]:
    """As stock's reducer does: a gradient times 1/N into its view of the bucket, one after the other."""
    pairs = list(zip(packing.grads, packing.slots(), strict=True))

    def copy_all() -> None:
        for grad, slot in pairs:
            torch.mul(grad, packing.scale, out=slot)

    return copy_all


def report_stock(report: Report, samples: dict[str, list[float]]) -> None:
    ratios = {name: paired(samples["ours"], samples[name], lambda a, b: a / b) for name in ("stock", "stock_graph")}
    report.row("small_stock", min(ratio["median"] for ratio in ratios.values()), times=ratios)


def is_right(kernels: object, packing: Packing) -> bool:
    """Bitwise what torch makes of the gradients, with their norm, and nothing that is not finite."""
    packing.bucket.fill_(-7.0)
    packing.pack()
    scaled = torch.cat([grad.view(-1) for grad in packing.grads]).float() * packing.scale
    right = torch.equal(torch.cat(packing.slots()), scaled.to(packing.dtype))
    norm, expected = float(sum_of(kernels, packing.partial_norms)), float(scaled.double().square().sum())
    finite = int(packing.first_nonfinite) == 2**31 - 1
    return right and abs(norm - expected) <= 1e-4 * expected and finite


def all_of(samples: dict[str, list[float]]) -> dict[str, dict]:
    return {f"{name}_gb_s": spread(values) for name, values in samples.items()}
