"""What an audit of the replicas costs, beside a step of forward and backward: ours alone, stock DDP has none.

    python bench/bench_audit.py                                # both models on 2 ranks; columns in bench/README.md
    python bench/bench_audit.py --models convnet,vit --every 10

Steps and audits are samples of two arms of the same wrapper, interleaved. Before it is timed, the audit has to find a
bit that is flipped on the last rank; each one that is timed has to have read every parameter.
"""

import argparse

import torch
from harness import Sampler, Series, World, base_parser, calibrate, interleave, main, one_of, ratio, rounds_within
from models import WORKLOADS, build
from records import Record, Table, spread
from torch import nn

import gpucomm

ARMS = ("step", "audit")
COLUMNS = {"model": 11, "P": 2, "params": 9, "tensors": 7, "arm": 6, "ms": 7, "p10": 7, "p90": 7}
COLUMNS |= {"/step": 7, "p10 ": 6, "p90 ": 6, "share%": 7, "rounds": 6, "#wrong": 6}
FEWEST_ROUNDS = 20


def missed_flips(world: World, ddp: gpucomm.DistributedDataParallel) -> int:
    """1 unless a bit that is flipped in the last parameter on the last rank is found there."""
    flat = list(ddp.module.parameters())[-1].data.view(-1).view(torch.uint8)
    is_last = world.rank == world.size - 1
    flat[-1] ^= is_last
    try:
        ddp.audit()
        found = world.size == 1
    except gpucomm.ReplicasDiffer:
        found = True
    flat[-1] ^= is_last
    return int(not found)


def samplers(world: World, module: nn.Module, inputs: tuple, transport: str) -> tuple[list[Sampler], str]:
    ddp = gpucomm.DistributedDataParallel(module, transport=transport)
    params = list(ddp.module.parameters())
    nbytes = sum(param.nbytes for param in params)
    missed = missed_flips(world, ddp)
    reports = []
    step = Sampler(
        "step",
        prepare=lambda: ddp.zero_grad(set_to_none=True),
        run=lambda: ddp(*inputs).backward(),
        check=lambda _: sum(param.grad is None for param in params),
    )
    audit = Sampler(
        "audit",
        prepare=reports.clear,
        run=lambda: reports.append(ddp.audit()),
        check=lambda _: missed + (reports[-1].parameters != len(params) or reports[-1].nbytes < nbytes),
    )
    return [step, audit], ddp.transport


def measure(world: World, args: argparse.Namespace, name: str) -> tuple[dict[str, Series], dict]:
    workload = build(name, world.rank, args.quick)
    params = list(workload.module.parameters())
    facts = {"parameters": sum(param.numel() for param in params), "tensors": len(params)}
    arms, facts["transport"] = samplers(world, workload.module, workload.inputs, args.transport)
    round_s = calibrate(world, arms, sample_us=0.0, limits=(1, 1))
    limits = (2, 4) if args.quick else (FEWEST_ROUNDS, args.rounds)
    return interleave(world, arms, rounds_within(world, round_s, args.seconds, limits)), facts


def report(args: argparse.Namespace, record: Record, table: Table, head: list, facts: dict, series: dict) -> None:
    for arm in args.arms:
        samples = series[arm]
        ms = spread(samples.us / 1e3)
        against = spread(ratio(samples, series["step"])) if arm == "audit" else None
        share = 100 * against["median"] / args.every if against else None
        record.write(
            bench="audit",
            model=head[0],
            **facts,
            world_size=head[1],
            arm=arm,
            ms=ms,
            ratio_to_step=against,
            every=args.every,
            share_percent=share,
            rounds=len(samples.us),
            wrong=samples.wrong,
        )
        ratios = [against[key] if against else None for key in ("median", "p10", "p90")]
        cells = [*head, facts["parameters"], facts["tensors"], arm, ms["median"], ms["p10"], ms["p90"]]
        table.row([*cells, *ratios, share, len(samples.us), samples.wrong])


def body(world: World, args: argparse.Namespace) -> None:
    record = Record(args.out, launcher=world.launcher, quick=args.quick, zero_grad="set_to_none, untimed")
    table = Table(COLUMNS)
    if world.rank == 0:
        print(f"\nmilliseconds, last rank's end; share: of step time with an audit every {args.every} steps")
        table.head()
    for name in args.models:
        series, facts = measure(world, args, name)
        if world.rank == 0:
            report(args, record, table, [name, world.size], facts, series)


def options() -> argparse.ArgumentParser:
    parser = base_parser("What an audit costs, beside a training step.", "2", ARMS)
    parser.add_argument("--models", type=one_of("model", list(WORKLOADS)), default=["gpt10m", "mlp16.8m"])
    parser.add_argument("--every", type=_positive, default=100, help="steps from one audit to the next (default 100)")
    parser.add_argument("--transport", default="auto", help="the transport to ask for (default auto)")
    parser.set_defaults(seconds=30.0)
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"every {text!r}: expected a number of steps, 1 or more")
    return int(text)


if __name__ == "__main__":
    main(__file__, options(), body)
