"""What a gradient and a bucket cost the host's processor, as in bench_engine.py, with tiny tensors on the GPU.

Processor time of all threads. A gradient: over a backward whose parameters have an empty hook. A bucket: the slope
between one bucket and many. At world size 1 NCCL enqueues nothing for a reduction in place, so its own part is not in
it. The GPU is idle when a sample begins, and its work is shorter than the host's: the host never waits within.
"""

import time
from collections.abc import Callable

import torch
from bench_engine import LINE_NUMEL, PARAMS_PER_BUCKET, TINY_NUMEL, Concatenation, wrap
from torch import nn

from gpu.device import Gpu
from gpu.group import joined
from gpu.place import Place
from gpu.report import Report
from gpu.timing import interleaved, paired, spread

_PARAMETERS = 500
_BUCKETS = 256
_TINY_PARAMETERS, _TINY_BUCKETS = 20, 4
_PLACEMENTS = 3  # times that everything is made anew: where memory lies moves a step
_ROUNDS = 20
_WARM_UP_STEPS = 3


def run(place: Place, report: Report) -> None:
    with joined(place) as ranks:
        gpu, wrong = ranks.gpu, []
        count, buckets = (_TINY_PARAMETERS, _TINY_BUCKETS) if gpu.dry_run else (_PARAMETERS, _BUCKETS)
        arms: dict[str, tuple[str, int | None]] = {arm: (arm, None) for arm in ("bare", "hook", "stock", "ours")}
        samples = measure(gpu, arms, count, TINY_NUMEL, wrong)
        for arm, name in (("ours", "gradient_us"), ("stock", "stock_gradient_us")):
            over = paired(samples[arm], samples["hook"], lambda a, b: (a - b) / count)
            report.row(name, over["median"], us=over, step_us=spread(samples[arm]), hook_us=spread(samples["hook"]))

        parameters = buckets * PARAMS_PER_BUCKET
        caps = {1: parameters * LINE_NUMEL * 4, buckets: PARAMS_PER_BUCKET * LINE_NUMEL * 4}
        plans = {f"{arm}/{number}": (arm, cap) for arm in ("ours", "stock") for number, cap in caps.items()}
        samples = measure(gpu, plans, parameters, LINE_NUMEL, wrong)
        for arm, name in (("ours", "bucket_us"), ("stock", "stock_bucket_us")):
            many, one = samples[f"{arm}/{buckets}"], samples[f"{arm}/1"]
            each = paired(many, one, lambda a, b: (a - b) / (buckets - 1))
            report.row(name, each["median"], us=each, step_us=spread(many), one_bucket_us=spread(one))
        report.row("right", sum(wrong) == 0, samples=len(wrong))


def measure(
    gpu: Gpu, arms: dict[str, tuple[str, int | None]], count: int, numel: int, wrong: list[int]
) -> dict[str, list[float]]:
    """Microseconds of a step, by arm: which wrapper, and the cap of its buckets in bytes. wrong: gets each sample's
    number of wrong elements."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(1 if gpu.dry_run else _PLACEMENTS):
        samplers = {
            name: sampler(gpu, module_of(gpu, arm, cap, count, numel), wrong) for name, (arm, cap) in arms.items()
        }
        for name, values in interleaved(samplers, 2 if gpu.dry_run else _ROUNDS).items():
            samples[name] += values
    return samples


def module_of(gpu: Gpu, arm: str, cap_bytes: int | None, count: int, numel: int) -> nn.Module:
    with torch.device(gpu.torch_device):
        module = Concatenation(count, numel)
    module = wrap(arm, module, cap_bytes, "auto")
    for _ in range(_WARM_UP_STEPS):
        module().backward()
    return module


def sampler(gpu: Gpu, module: nn.Module, wrong: list[int]) -> Callable[[], float]:
    params = list(module.parameters())

    def sample() -> float:
        gpu.synchronize()
        started = time.process_time_ns()
        for param in params:
            param.grad = None
        module().backward()
        us = (time.process_time_ns() - started) / 1e3
        wrong.append(int((torch.cat([param.grad for param in params]) != 1).sum()))
        return us

    return sample
