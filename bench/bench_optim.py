"""One step of AdamW at world size 1: ours, torch's fused and foreach, and the read-modify-write bandwidth of the same
arrays.

    python bench/bench_optim.py

Each arm has parameters, gradients and state of its own. `memory` reads and writes what a step does, 28 bytes an
element, and nothing else.
"""

import argparse

import torch
from harness import Sampler, Series, World, base_parser, calibrate, interleave, main, ratio, rounds_within
from models import build
from records import Record, Table, spread
from torch import nn

from gpucomm.optim import AdamW

ARMS = ("memory", "fused", "foreach", "ours")
COLUMNS = {"what": 12, "numel": 9, "tensors": 7, "arm": 8, "us": 8, "p10": 8, "p90": 8, "GB/s": 6, "of memory": 9}
COLUMNS |= {"fused/": 7, "p10 ": 7, "p90 ": 7, "rounds": 6, "#wrong": 6}
BYTES = 28  # of an element: gradient, parameter and two moments are read, the last three written
SAMPLE_US = 20_000.0
CHECKED = 1000  # elements of a parameter


def flat(quick: bool) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(1 << (12 if quick else 24)))]


def many(quick: bool) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(1000)) for _ in range(20 if quick else 1000)]


def mlp(quick: bool) -> list[nn.Parameter]:
    return list(build("mlp16.8m", 0, quick).module.parameters())


CASES = {"flat": flat, "1000 x 1000": many, "mlp16.8m": mlp}


def optimizer_for(make: type, options: dict, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Over copies of the parameters, with gradients that stay."""
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    for index, param in enumerate(copies):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
    return make(copies, **options)


def step_sampler(name: str, optimizer: torch.optim.Optimizer) -> Sampler:
    """Steps; the check replays as many with torch's plain AdamW on the first elements of the first parameters."""
    params = optimizer.param_groups[0]["params"][:3]
    checked = [param.detach().flatten()[:CHECKED] for param in params]
    twins = [nn.Parameter(part.clone()) for part in checked]
    for twin, param in zip(twins, params, strict=True):
        twin.grad = param.grad.flatten()[:CHECKED].clone()
    reference = torch.optim.AdamW(twins, foreach=False, fused=False)

    def check(steps: int) -> int:
        for _ in range(steps):
            reference.step()
        pairs = zip(checked, twins, strict=True)
        return sum(int((~torch.isclose(param, twin, rtol=1e-4, atol=1e-4)).sum()) for param, twin in pairs)

    return Sampler(name, prepare=lambda: None, run=optimizer.step, check=check)


def memory_sampler(optimizer: AdamW) -> Sampler:
    """Reads and writes as many bytes as a step, in the same arrays: adds zero to parameter and second moment, and zero
    times the gradient to the first moment."""
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.step()
    first, second = optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]
    weights, grad = param.detach(), param.grad
    before: list[torch.Tensor] = []

    def prepare() -> None:
        before[:] = [array[:CHECKED].clone() for array in (weights, first, second)]

    def run() -> None:
        weights.add_(0)
        first.add_(grad, alpha=0)
        second.add_(0)

    def check(_: int) -> int:
        arrays = zip((weights, first, second), before, strict=True)
        return sum(int((array[:CHECKED] != old).sum()) for array, old in arrays)

    return Sampler("memory", prepare, run, check)


def samplers_of(args: argparse.Namespace, params: list[nn.Parameter]) -> list[Sampler]:
    samplers = []
    for arm in args.arms:
        if arm == "memory" and len(params) == 1:
            samplers.append(memory_sampler(optimizer_for(AdamW, {}, params)))
        elif arm == "ours":
            samplers.append(step_sampler("ours", optimizer_for(AdamW, {}, params)))
        elif arm != "memory":
            samplers.append(step_sampler(arm, optimizer_for(torch.optim.AdamW, {arm: True}, params)))
    return samplers


def measure(world: World, args: argparse.Namespace, what: str) -> tuple[dict[str, Series], list[nn.Parameter]]:
    torch.manual_seed(0)
    params = CASES[what](args.quick)
    samplers = samplers_of(args, params)
    round_s = calibrate(world, samplers, SAMPLE_US, (1, 1 if args.quick else 20))
    limits = (2, 4) if args.quick else (20, args.rounds)
    return interleave(world, samplers, rounds_within(world, round_s, args.seconds, limits)), params


def body(world: World, args: argparse.Namespace) -> None:
    if world.size != 1:
        raise SystemExit(f"bench_optim.py: world size {world.size}: a step alone is measured with --ranks 1")
    record = Record(args.out, launcher=world.launcher, quick=args.quick, threads=torch.get_num_threads())
    table = Table(COLUMNS)
    print("\nmicroseconds of a step of AdamW, fp32; GB/s at 28 bytes an element")
    table.head()
    for what in CASES:
        series, params = measure(world, args, what)
        numel = sum(param.numel() for param in params)
        for arm, steps in series.items():
            us = spread(steps.us)
            share = spread(ratio(series["memory"], steps)) if "memory" in series and arm != "memory" else None
            faster = spread(ratio(series["fused"], steps)) if "fused" in series and arm != "fused" else None
            gb_s = numel * BYTES / us["median"] / 1e3
            record.write(
                bench="optim",
                what=what,
                numel=numel,
                tensors=len(params),
                world_size=1,
                arm=arm,
                us=us,
                gb_s=gb_s,
                share_of_memory=share,
                fused_over_arm=faster,
                rounds=len(steps.us),
                wrong=steps.wrong,
            )
            cells = [us[key] for key in ("median", "p10", "p90")] + [gb_s, share["median"] if share else None]
            cells += [faster[key] if faster else None for key in ("median", "p10", "p90")]
            table.row([what, numel, len(params), arm, *cells, len(steps.us), steps.wrong])


def options() -> argparse.ArgumentParser:
    return base_parser("A step of AdamW against torch's and the memory's bandwidth.", "1", ARMS)


if __name__ == "__main__":
    main(__file__, options(), body)
