"""The engine's own cost at world size 1: microseconds per gradient, per bucket and per trace event, stock DDP
beside it.

    python bench/bench_engine.py

A step is zero_grad, forward and backward of torch.cat over many tiny parameters: autograd does little beside
accumulating one gradient per parameter, so a step's time over the number of parameters is the cost of a gradient.
Times are CPU time of the process, all its threads together: unlike the wall clock it does not count what other jobs
of the machine take. Arms: `bare` autograd; `hook`, an empty post-accumulate hook that is a C function; stock DDP;
ours. What autograd calls for each gradient is timed alone too (`hook call`): our hooks, and the empty one, in a loop.
The cost of a bucket is the slope between a plan of one bucket and one of many over the same parameters, all of
which fit in cache: with larger ones the slope is that of memory. Where a module's memory lies moves a step by more than
what is measured, so everything is made anew several times.
"""

import argparse
import time
from collections.abc import Callable

import torch
from harness import Sampler, Series, World, base_parser, calibrate, interleave, main, rounds_within
from hook_calls import HookCalls, OurHookCalls, empty_hook
from records import Record, Table, spread
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

ARMS = ("bare", "hook", "stock", "stock_views", "ours")
COLUMNS = {"what": 11, "arm": 11, "count": 6, "step us": 8, "us each": 8, "p10": 8, "p90": 8, "over bare": 9}
COLUMNS |= {"over hook": 9, "p10 ": 7, "p90 ": 7, "rounds": 6, "#wrong": 6}
TRACE_EVENTS = 10_000
SAMPLE_US = 20_000.0  # several steps: the check of the last sample leaves cold caches
TINY_NUMEL = 8
LINE_NUMEL = 16  # a cache line: in the bucket rows, a bucket is a whole number of parameters
PARAMS_PER_BUCKET = 2
PLACEMENTS = 6  # times that modules are made anew


class Concatenation(nn.Module):
    """Sum of the concatenation of `count` parameters of `numel` elements: every gradient is all ones."""

    def __init__(self, count: int, numel: int):
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])
        self._listed = list(self.params)  # indexing a ParameterList costs a microsecond per parameter

    def forward(self) -> torch.Tensor:
        return torch.cat(self._listed).sum()


def wrap(arm: str, module: nn.Module, cap_bytes: int | None, transport: str) -> nn.Module:
    cap_mb = None if cap_bytes is None else cap_bytes / 2**20
    if arm == "hook":
        hook = empty_hook()
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(hook)
    if arm == "ours":
        import gpucomm

        return gpucomm.DistributedDataParallel(module, bucket_cap_mb=cap_mb, transport=transport)
    if arm in ("stock", "stock_views"):
        return StockDdp(module, bucket_cap_mb=cap_mb, gradient_as_bucket_view=arm == "stock_views")
    return module


def sampler(name: str, module: nn.Module, params: list[nn.Parameter]) -> Sampler:
    def step() -> None:
        for param in params:
            param.grad = None
        module().backward()

    def check(_: int) -> int:
        return sum(int((param.grad != 1).sum()) for param in params)

    return Sampler(name, prepare=lambda: None, run=step, check=check, clock=time.process_time_ns)


def measure_steps(
    world: World, args: argparse.Namespace, plans: dict[str, tuple[str, int | None]], count: int, numel: int
):
    """Series of steps: `plans` maps a label to an arm and its bucket cap in bytes."""

    def make() -> list[Sampler]:
        samplers = []
        for label, (arm, cap_bytes) in plans.items():
            module = Concatenation(count, numel)
            params = list(module.parameters())
            samplers.append(sampler(label, wrap(arm, module, cap_bytes, args.transport), params))
        return samplers

    return measure(world, args, make, 1 if args.quick else 20)


def measure(
    world: World, args: argparse.Namespace, make: Callable[[], list[Sampler]], most_ops: int
) -> dict[str, Series]:
    """Series by sampler's name. make: samplers of modules made anew; most_ops: that a sample may repeat."""
    placements = 1 if args.quick else PLACEMENTS
    parts: dict[str, list[Series]] = {}
    for _ in range(placements):
        samplers = make()
        round_s = calibrate(world, samplers, SAMPLE_US, (1, most_ops))
        limits = (2, 4) if args.quick else (10, args.rounds)
        rounds = rounds_within(world, round_s, args.seconds / placements, limits)
        for label, series in interleave(world, samplers, rounds).items():
            parts.setdefault(label, []).append(series)
    return {label: joined(series) for label, series in parts.items()}


def joined(parts: list[Series]) -> Series:
    return Series(torch.cat([part.us for part in parts]), sum(part.wrong for part in parts), parts[0].ops)


def gradient_rows(world: World, args: argparse.Namespace, rows: "Rows") -> None:
    count = 100 if args.quick else args.count
    series = measure_steps(world, args, {arm: (arm, None) for arm in args.arms}, count, TINY_NUMEL)
    for arm, steps in series.items():
        over_bare = over(steps, series.get("bare"), count) if arm != "bare" else None
        over_hook = over(steps, series.get("hook"), count) if arm not in ("bare", "hook") else None
        rows.write("gradient", arm, count, steps, spread(steps.us / count), over_bare, over_hook)


def hook_rows(world: World, args: argparse.Namespace, rows: "Rows") -> None:
    count = 100 if args.quick else args.count

    def make() -> list[Sampler]:
        empty, ours = Concatenation(count, TINY_NUMEL), Concatenation(count, TINY_NUMEL)
        hook = empty_hook()
        calls = {
            "hook": HookCalls([(hook, param) for param in empty.parameters()]),
            "ours": OurHookCalls(ours, args.transport),
        }
        return [calls[arm].sampler(arm) for arm in args.arms if arm in calls]

    if "ours" not in args.arms:
        return
    series = measure(world, args, make, 1)
    for arm, calls in series.items():
        over_hook = over(calls, series.get("hook"), count) if arm != "hook" else None
        rows.write("hook call", arm, count, calls, spread(calls.us / count), None, over_hook)


def bucket_rows(world: World, args: argparse.Namespace, rows: "Rows") -> None:
    buckets = 8 if args.quick else 512
    count = buckets * PARAMS_PER_BUCKET
    few, many = count * LINE_NUMEL * 4, PARAMS_PER_BUCKET * LINE_NUMEL * 4
    arms = [arm for arm in args.arms if arm not in ("bare", "hook")]
    plans = {f"{arm}/{number}": (arm, cap) for arm in arms for number, cap in ((1, few), (buckets, many))}
    series = measure_steps(world, args, plans, count, LINE_NUMEL) if plans else {}
    for arm in arms:
        one, each = series[f"{arm}/1"], series[f"{arm}/{buckets}"]
        rows.write("bucket", arm, buckets, each, over(each, one, buckets - 1))


def trace_rows(world: World, args: argparse.Namespace, rows: "Rows") -> None:
    if "ours" not in args.arms:
        return
    from gpucomm import _core

    trace = _core.Trace()
    rounds = 4 if args.quick else args.rounds
    us = torch.tensor([trace.measure_record_ns(TRACE_EVENTS) / 1e3 for _ in range(rounds)])
    lost = rounds * TRACE_EVENTS - trace.recorded()
    rows.write("trace event", "ours", TRACE_EVENTS, Series(us * TRACE_EVENTS, lost, 1), spread(us))


def over(steps: Series, base: Series | None, count: int) -> dict | None:
    """Paired difference to `base`, microseconds each."""
    return spread((steps.us - base.us) / count) if base else None


class Rows:
    """Where rows go: the record and the table."""

    def __init__(self, world: World, args: argparse.Namespace):
        self._record = Record(args.out, launcher=world.launcher, quick=args.quick)
        self._table = Table(COLUMNS)
        print("\nCPU microseconds at world size 1; a bucket's cost is the slope between one bucket and `count`")
        self._table.head()

    def write(self, what: str, arm: str, count: int, steps: Series, each: dict, over_bare=None, over_hook=None) -> None:
        step_us = spread(steps.us)
        self._record.write(
            bench="engine",
            what=what,
            arm=arm,
            count=count,
            world_size=1,
            step_us=step_us,
            us_each=each,
            us_over_bare=over_bare,
            us_over_hook=over_hook,
            rounds=len(steps.us),
            wrong=steps.wrong,
        )
        three = ("median", "p10", "p90")
        beyond = [over_hook[key] if over_hook else None for key in three]
        costs = [each[key] for key in three] + [over_bare["median"] if over_bare else None]
        self._table.row([what, arm, count, step_us["median"], *costs, *beyond, len(steps.us), steps.wrong])


def body(world: World, args: argparse.Namespace) -> None:
    if world.size != 1:
        raise SystemExit(f"bench_engine.py: world size {world.size}: the engine's own cost is measured with --ranks 1")
    rows = Rows(world, args)
    gradient_rows(world, args, rows)
    hook_rows(world, args, rows)
    bucket_rows(world, args, rows)
    trace_rows(world, args, rows)


def options() -> argparse.ArgumentParser:
    parser = base_parser("The engine's cost per gradient, per bucket and per trace event.", "1", ARMS)
    parser.add_argument("--count", type=int, default=1000, help="parameters in the gradient rows (default 1000)")
    parser.add_argument("--transport", default="auto", help="ours: the transport to ask for (default auto)")
    return parser


if __name__ == "__main__":
    main(__file__, options(), body)
