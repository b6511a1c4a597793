"""A step of forward and backward over a real wire: two namespaces joined at 1 Gbit/s, one rank in each, gloo between.

    python bench/bench_network.py                      # needs root and iproute2; see bench/README.md for the columns
    python bench/bench_network.py --models gpt10m --out network.jsonl

The wire is measured in the same rounds as the arms: its latency by a loop of tiny all-reduces, its bandwidth by one of
as many bytes as the model has. From both, the plan of ours and its trace comes the least time that a step can take:
no bucket can be complete before

    last gradient ready + latency + bytes of the last bucket / bandwidth
    first gradient ready + all bytes / bandwidth

each on the rank where it is later. What a step takes beyond the plain module's is its exposed communication; what the
least time does is the bound of that. So `none` and `ours` always take part. Step and least time come from one sample;
latency, bandwidth and bound are medians of the run.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from harness import Sampler, Series, World, base_parser, calibrate, interleave, main, one_of, ratio, rounds_within
from models import WORKLOADS, build
from records import Record, Table, spread
from steps import ARMS, Steps, wrap
from timeline import Timeline, bucket_nbytes, overlap_ns
from wire import RATE_BITS_PER_S, SHAPE, two_hosts

MODELS = ("gpt10m", "mlp16.8m")
COLUMNS = {"model": 9, "arm": 11, "ms": 6, "p10": 6, "p90": 6, "/stock": 6, "p10 ": 6, "p90 ": 6}
COLUMNS |= {"/stock_views": 12, "p10  ": 6, "p90  ": 6, "exposed": 7, "bound": 6, "/bound": 6, "p10   ": 6, "p90   ": 6}
COLUMNS |= {"overlap": 7, "rounds": 6, "#wrong": 6}
LATENCY_OPS = 20
FEWEST_ROUNDS = 10


@dataclass
class Measured:
    """series: by arm, and of the wire's two samplers; timelines: of ours, by round and rank; its bucket sizes."""

    series: dict[str, Series]
    timelines: list[list[Timeline]]
    bucket_nbytes: list[int]

    @property
    def nbytes(self) -> int:
        return sum(self.bucket_nbytes)


def wire_samplers(world: World, nbytes: int) -> list[Sampler]:
    """Samplers of an all-reduce of one element, and of `nbytes`: latency and bandwidth."""

    def sampler(name: str, numel: int) -> Sampler:
        array = torch.empty(numel)
        return Sampler(
            name,
            prepare=lambda: array.fill_(1.0),
            run=lambda: dist.all_reduce(array),
            check=lambda ops: int((array != float(world.size**ops)).sum()),
        )

    return [sampler("latency", 1), sampler("bandwidth", nbytes // 4)]


def measure(world: World, args: argparse.Namespace, name: str) -> Measured:
    steps = Steps(world, build(name, world.rank, args.quick))
    timelines: list[torch.Tensor] = []
    arms = []
    for arm in ARMS:
        if arm not in args.arms and arm not in ("none", "ours"):
            continue
        module = wrap(arm, steps.copy_of_module(), "c10d")
        arms.append(steps.sampler(arm, module, reduced=arm != "none"))
    ours, check = module, arms[-1].check

    def check_and_read(ops: int) -> int:
        timelines.append(Timeline.latest(ours.trace()).to_tensor())
        return check(ops)

    arms[-1].check = check_and_read
    wire = wire_samplers(world, steps.parameters * 4)
    round_s = calibrate(world, [*arms, *wire], sample_us=0.0, limits=(1, 1))
    wire[0].ops = LATENCY_OPS
    limits = (2, 2) if args.quick else (FEWEST_ROUNDS, args.rounds)
    rounds = rounds_within(world, round_s, args.seconds, limits)
    series = interleave(world, [*arms, *wire], rounds)
    by_rank = world.gather(torch.stack(timelines[-rounds:]))
    sizes = bucket_nbytes(ours.trace())
    return Measured(
        series,
        [[Timeline.from_tensor(rank[turn]) for rank in by_rank] for turn in range(rounds)],
        sizes,
    )


def least_us(found: Measured) -> torch.Tensor:
    """The least time that a step of ours can take with its plan and this wire, one value per round."""
    latency = found.series["latency"].us.median()
    us_per_byte = (found.series["bandwidth"].us.median() - latency) / found.nbytes
    start_ns = found.series["ours"].start_ns
    first = torch.tensor([max(rank.backward[0] for rank in ranks) for ranks in found.timelines]) - start_ns
    last = torch.tensor([max(rank.backward[1] for rank in ranks) for ranks in found.timelines]) - start_ns
    return torch.maximum(
        last / 1e3 + latency + found.bucket_nbytes[-1] * us_per_byte, first / 1e3 + found.nbytes * us_per_byte
    )


def overlap(found: Measured) -> torch.Tensor:
    """The share of backward, first to last gradient, in which a bucket was on its way: of the worst rank, per round."""
    shares = []
    for ranks in found.timelines:
        lengths = [end - begin for begin, end in (rank.backward for rank in ranks)]
        shares.append(min(overlap_ns(ranks, rank) / length for rank, length in enumerate(lengths)))
    return torch.tensor(shares)


def against(series: dict[str, Series], arm: str, peer: str) -> dict | None:
    return spread(ratio(series[arm], series[peer])) if peer in series and arm != peer else None


def report(record: Record, table: Table, name: str, found: Measured) -> None:
    series = found.series
    none, least = series["none"].us, least_us(found)
    bound_us = least - none
    latency_us = spread(series["latency"].us)
    bandwidth = spread(found.nbytes / (series["bandwidth"].us - series["latency"].us))
    wire_wrong = series["latency"].wrong + series["bandwidth"].wrong
    for arm in (arm for arm in ARMS if arm in series):
        samples = series[arm]
        ours = arm == "ours"
        facts = {
            "ms": spread(samples.us / 1e3),
            "ratio_to_stock": against(series, arm, "stock"),
            "ratio_to_stock_views": against(series, arm, "stock_views"),
            "exposed_ms": spread((samples.us - none) / 1e3) if arm != "none" else None,
            "bound_ms": spread(bound_us / 1e3) if ours else None,
            "exposed_over_bound": spread(1 + (samples.us - least) / bound_us.median()) if ours else None,
            "overlap": spread(overlap(found)) if ours else None,
            "rounds": len(samples.us),
            "wrong": samples.wrong + wire_wrong,
        }
        record.write(
            bench="network",
            model=name,
            bytes=found.nbytes,
            bucket_bytes=found.bucket_nbytes,
            arm=arm,
            latency_us=latency_us,
            bandwidth_mb_s=bandwidth,
            **facts,
        )
        table.row([name, arm, *cells(facts)])
    print(
        f"{name}: {found.nbytes / 1e6:.1f} MB in {len(found.bucket_nbytes)} buckets, the last of "
        f"{found.bucket_nbytes[-1] / 1e6:.1f}; the wire: {latency_us['median']:.0f} us, {bandwidth['median']:.1f} MB/s "
        f"({bandwidth['p10']:.1f} to {bandwidth['p90']:.1f})",
        flush=True,
    )


def cells(facts: dict) -> list[object]:
    def three(key: str) -> list[object]:
        return [facts[key][part] if facts[key] else None for part in ("median", "p10", "p90")]

    def median(key: str) -> object:
        return three(key)[0]

    ratios = [*three("ms"), *three("ratio_to_stock"), *three("ratio_to_stock_views")]
    bounds = [median("exposed_ms"), median("bound_ms"), *three("exposed_over_bound"), median("overlap")]
    return [*ratios, *bounds, facts["rounds"], facts["wrong"]]


def body(world: World, args: argparse.Namespace) -> None:
    wire = {"rate_bits_per_s": RATE_BITS_PER_S, "tbf": " ".join(SHAPE)}
    record = Record(args.out, launcher=world.launcher, quick=args.quick, world_size=world.size, wire=wire)
    table = Table(COLUMNS)
    if world.rank == 0:
        print(f"\nmilliseconds per step (forward, backward), last rank's end; {' '.join(SHAPE)} between 2 ranks")
        table.head()
    for name in args.models:
        found = measure(world, args, name)
        if world.rank == 0:
            report(record, table, name, found)


def options() -> argparse.ArgumentParser:
    parser = base_parser("A training step over a real wire against stock DDP.", "2", ARMS)
    parser.add_argument(
        "--models",
        type=one_of("model", list(WORKLOADS)),
        default=list(MODELS),
        help=f"default: {','.join(MODELS)}; known: {','.join(WORKLOADS)}",
    )
    parser.set_defaults(seconds=60.0, rounds=60)
    return parser


if __name__ == "__main__":
    main(__file__, options(), body, two_hosts)
