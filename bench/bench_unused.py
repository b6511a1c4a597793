"""What `find_unused_parameters=True` costs over `False` on a model of 1,000 modules, all of them used.

    python bench/bench_unused.py                       # see bench/README.md for the columns

Each arm's wrapper is there twice, without and with, and both take a sample in every round: the cost is their paired
difference. Stock DDP walks the autograd graph in every iteration.
"""

import argparse

from harness import Series, World, base_parser, calibrate, interleave, main, rounds_within
from models import build
from records import Record, Table, spread
from steps import ARMS, Steps, wrap
from torch import nn

MODEL = "modules1000"
COLUMNS = {"modules": 7, "P": 2, "arm": 11, "ms": 6, "p10": 6, "p90": 6, "with": 6, "p10 ": 6, "p90 ": 6}
COLUMNS |= {"cost us": 7, "p10  ": 7, "p90  ": 7, "cost %": 6, "rounds": 6, "#wrong": 6}
FEWEST_ROUNDS = 20


def measure(world: World, args: argparse.Namespace) -> tuple[dict[str, Series], int]:
    """Series by arm, "+ find" behind its name with find_unused_parameters; and the number of modules."""
    workload = build(MODEL, world.rank, args.quick)
    steps = Steps(world, workload)
    samplers = []
    for arm in args.arms:
        for name, find in ((arm, False), (f"{arm} + find", True)):
            module = wrap(arm, steps.copy_of_module(), args.transport, find_unused_parameters=find)
            samplers.append(steps.sampler(name, module, reduced=True))
    round_s = calibrate(world, samplers, sample_us=0.0, limits=(1, 1))
    limits = (2, 4) if args.quick else (FEWEST_ROUNDS, args.rounds)
    series = interleave(world, samplers, rounds_within(world, round_s, args.seconds, limits))
    return series, sum(isinstance(module, nn.Linear) for module in workload.module.modules())


def body(world: World, args: argparse.Namespace) -> None:
    series, modules = measure(world, args)
    if world.rank != 0:
        return
    record = Record(args.out, launcher=world.launcher, quick=args.quick, zero_grad="set_to_none, untimed")
    table = Table(COLUMNS)
    print("\nmilliseconds per step without and with find_unused_parameters; cost: paired difference, share of a step")
    table.head()
    for arm in args.arms:
        without, found = series[arm], series[f"{arm} + find"]
        ms, with_ms = spread(without.us / 1e3), spread(found.us / 1e3)
        cost_us, share = spread(found.us - without.us), spread((found.us - without.us) / without.us)
        wrong = without.wrong + found.wrong
        record.write(
            bench="unused",
            modules=modules,
            world_size=world.size,
            arm=arm,
            ms=ms,
            with_find_ms=with_ms,
            cost_us=cost_us,
            cost_share=share,
            rounds=len(found.us),
            wrong=wrong,
        )
        spreads = [each[key] for each in (ms, with_ms, cost_us) for key in ("median", "p10", "p90")]
        table.row([modules, world.size, arm, *spreads, 100 * share["median"], len(found.us), wrong])


def options() -> argparse.ArgumentParser:
    arms = [arm for arm in ARMS if arm != "none"]
    parser = base_parser("The cost of find_unused_parameters=True over False.", "2", arms)
    parser.add_argument("--transport", default="auto", help="ours: the transport to ask for (default auto)")
    parser.set_defaults(seconds=40.0)
    return parser


if __name__ == "__main__":
    main(__file__, options(), body)
