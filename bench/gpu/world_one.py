"""World size 1: what the wrappers add to a step, forward and backward, of a GPT of 124 M parameters in bf16.

The wall clock, with the GPU idle at both ends of a sample of several steps: it sees what the host costs too.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpu.device import Gpu
from gpu.group import joined
from gpu.place import Place
from gpu.report import Report
from gpu.timing import interleaved, paired, spread
from gpu.training import GPT_124M, TINY, batch, language_model, largest_difference, step, wrapped

_STEPS = 5
_WARM_UP_STEPS = 3
_SECONDS = 12.0
_DIFFERENCE = 0.02  # attention's backward adds in an order of its own each time, in bf16
_ARMS = {
    "bare": ("bare", {}),
    "stock": ("stock", {}),
    "views": ("stock", {"gradient_as_bucket_view": True}),
    "ours": ("ours", {}),
}


def run(place: Place, report: Report) -> None:
    with joined(place) as ranks:
        gpu = ranks.gpu
        shape = TINY if gpu.dry_run else GPT_124M
        plain = language_model(gpu, shape, torch.bfloat16)
        inputs = batch(gpu, shape, 2 if gpu.dry_run else 8, seed=2)
        models = {arm: wrapped(name, plain, **arguments) for arm, (name, arguments) in _ARMS.items()}
        arms = {arm: sampler(gpu, model, inputs) for arm, model in models.items()}
        for model in models.values():
            for _ in range(_WARM_UP_STEPS):
                step(model, inputs)
        samples = interleaved(arms, rounds_for(gpu, arms))
        report.row("bare_ms", spread(samples["bare"])["median"], ms=spread(samples["bare"]))
        for arm in ("ours", "stock", "views"):
            over = paired(samples[arm], samples["bare"], lambda a, b: 100 * (a / b - 1))
            report.row(f"{arm}_percent", over["median"], percent=over, ms=spread(samples[arm]))
        differences = {arm: largest_difference(models[arm], models["bare"]) for arm in models}
        report.row("right", max(differences.values()) < _DIFFERENCE, differences=differences)


def sampler(gpu: Gpu, model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], float]:
    """Milliseconds of a step."""

    def sample() -> float:
        gpu.synchronize()
        started = time.perf_counter()
        for _ in range(_STEPS):
            step(model, inputs)
        gpu.synchronize()
        return (time.perf_counter() - started) * 1e3 / _STEPS

    return sample


def rounds_for(gpu: Gpu, arms: dict[str, Callable[[], float]]) -> int:
    """As many as fill the time, an even number."""
    if gpu.dry_run:
        return 2
    round_s = sum(sample() for sample in arms.values()) * _STEPS / 1e3
    return max(6, min(60, int(_SECONDS / round_s) // 2 * 2))
