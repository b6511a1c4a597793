"""A step of forward and backward on eight models: no communication, stock DDP without and with views, ours.

    python bench/bench_ddp.py                          # all models on 2 ranks; see bench/README.md for the columns
    python bench/bench_ddp.py --models gpt10m,vit --ranks 2,4 --out ddp.jsonl

steps.py says what a step is and how it is checked.
"""

import argparse

from harness import Series, World, base_parser, calibrate, interleave, main, one_of, ratio, rounds_within
from models import WORKLOADS, build
from records import Record, Table, spread
from steps import ARMS, Steps, wrap

COLUMNS = {"model": 11, "P": 2, "params": 9, "tensors": 7, "arm": 11, "ms": 7, "p10": 7, "p90": 7}
COLUMNS |= {"/stock_views": 12, "p10 ": 6, "p90 ": 6, "removed": 7, "rounds": 6, "#wrong": 6}
FEWEST_ROUNDS = 20


def measure(world: World, args: argparse.Namespace, name: str) -> tuple[dict[str, Series], dict]:
    steps = Steps(world, build(name, world.rank, args.quick))
    facts = {"parameters": steps.parameters, "tensors": steps.tensors, "transport": None}
    samplers = []
    for arm in args.arms:
        module = wrap(arm, steps.copy_of_module(), args.transport)
        if arm == "ours":
            facts["transport"] = module.transport
        samplers.append(steps.sampler(arm, module, reduced=arm != "none"))
    round_s = calibrate(world, samplers, sample_us=0.0, limits=(1, 1))
    limits = (2, 4) if args.quick else (FEWEST_ROUNDS, args.rounds)
    return interleave(world, samplers, rounds_within(world, round_s, args.seconds, limits)), facts


def report(world: World, record: Record, table: Table, name: str, facts: dict, series: dict[str, Series]) -> None:
    peer, none = series.get("stock_views"), series.get("none")
    overhead = (peer.us.median() - none.us.median()).item() if peer and none else None
    for arm, samples in series.items():
        ms = spread(samples.us / 1e3)
        against = spread(ratio(samples, peer)) if peer and arm != "stock_views" else None
        saved = (peer.us.median() - samples.us.median()).item() if peer else None
        removed = saved / overhead if overhead and overhead > 0 and arm not in ("none", "stock_views") else None
        record.write(
            bench="ddp",
            model=name,
            **facts,
            world_size=world.size,
            arm=arm,
            ms=ms,
            ratio_to_stock_views=against,
            overhead_removed=removed,
            rounds=len(samples.us),
            wrong=samples.wrong,
        )
        ratios = [against[key] if against else None for key in ("median", "p10", "p90")]
        heads = [name, world.size, facts["parameters"], facts["tensors"], arm, ms["median"], ms["p10"], ms["p90"]]
        table.row([*heads, *ratios, removed, len(samples.us), samples.wrong])


def body(world: World, args: argparse.Namespace) -> None:
    record = Record(args.out, launcher=world.launcher, quick=args.quick, zero_grad="set_to_none, untimed")
    table = Table(COLUMNS)
    if world.rank == 0:
        print(f"\nmilliseconds per step (forward, backward), last rank's end; P = {world.size}")
        table.head()
    for name in args.models:
        series, facts = measure(world, args, name)
        if world.rank == 0:
            report(world, record, table, name, facts, series)


def options() -> argparse.ArgumentParser:
    parser = base_parser("A training step against stock DDP.", "2", ARMS)
    parser.add_argument(
        "--models",
        type=one_of("model", list(WORKLOADS)),
        default=list(WORKLOADS),
        help="default: all of " + ",".join(WORKLOADS),
    )
    parser.add_argument("--transport", default="auto", help="ours: the transport to ask for (default auto)")
    parser.set_defaults(seconds=30.0)
    return parser


if __name__ == "__main__":
    main(__file__, options(), body)
