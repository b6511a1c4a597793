"""Collectives on one host: ours against torch.distributed's gloo and Open MPI, 4 B to 256 MiB, and the memory limit.

    python bench/bench_transport.py                    # everything; see bench/README.md for the columns
    python bench/bench_transport.py --ops all_reduce --ranks 2 --sizes 4,4K,1M,64M --out transport.jsonl

A row is four functions: sizes (`numel_for`), fill and check (`Cell`), run (collectives.py) and the bandwidth
formula (`algbw`, `busbw_factor`, derived in docs/bandwidth.md). The limit is what reading and writing the same
arrays once costs all ranks at once.
"""

import argparse
import os

import numpy as np
import patterns
import torch
from collectives import OPS, Gloo, Mpi, Ours
from harness import Sampler, Series, World, base_parser, calibrate, interleave, main, one_of, ratio, rounds_within
from records import Record, Table, parse_size, size_text, spread

ARMS = ("ours", "ours_plain", "gloo", "mpi")
SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,128M,256M"
QUICK_SIZES = "4,64K,1M"
SAMPLE_US = 2000.0
CROWDED_SAMPLE_US = 20000.0  # with more ranks than cores: several of the scheduler's time slices
SINGLE_OP_BYTES = 32 << 20  # from here on a sample is one operation on freshly filled arrays
LOOP_BELOW_BYTES, LEAST_LOOP = 256 << 10, 5  # below, a sample is never a single operation
LIMIT_FROM_BYTES = 1 << 20  # below, the time of the memory pass is the interpreter's
COLUMNS = {
    "op": 14,
    "bytes": 6,
    "P": 2,
    "arm": 10,
    "us": 9,
    "p10": 9,
    "p90": 9,
    "min": 9,
    "max": 9,
    "algbw": 7,
    "busbw": 7,
}
COLUMNS |= {"limit%": 6, "vs gloo": 8, "p10 ": 7, "p90 ": 7, "n": 4, "rounds": 6, "#wrong": 6}


def numel_for(op: str, numbytes: int, size: int) -> int:
    """float32 elements of a row of `numbytes`; for operations on shares, a positive multiple of the ranks."""
    parts = size if op in ("reduce_scatter", "all_gather") else 1
    return max(1, -(-numbytes // (4 * parts))) * parts


def algbw(numbytes: int, us: float) -> float:
    """GB/s of the array's size over the time."""
    return numbytes / us / 1e3


def busbw_factor(op: str, size: int) -> float:
    """What algbw is multiplied by to count the bytes that each rank has to exchange (docs/bandwidth.md)."""
    return {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0}.get(op, (size - 1) / size)


class Buffers:
    """An arm's two arrays, allocated once for the largest row and sliced for the others."""

    def __init__(self, arm, max_numel: int, size: int):
        self._whole, self._part = arm.empty(max_numel), arm.empty(max_numel // size)

    def slice(self, numel: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._whole[:numel], self._part[: numel // size]


class Cell:
    """One operation at one size: fills an arm's arrays before a sample and checks them after it."""

    def __init__(self, world: World, op: str, numel: int):
        self._world, self._op, self._numel = world, op, numel
        self._marks = 0
        self.undo_every = patterns.max_sums(world.size) - 1
        self._own_row = patterns.row(world.rank)

    def prepare(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        if self._op == "all_reduce" or self._op == "reduce_scatter":
            patterns.fill(whole, self._own_row)
            part.fill_(patterns.UNTOUCHED)
        elif self._op == "all_gather":
            whole.fill_(patterns.UNTOUCHED)
            patterns.fill(part, self._own_row)
        elif self._op == "broadcast":
            patterns.fill(whole, self._own_row) if self._world.rank == 0 else whole.fill_(patterns.UNTOUCHED)

    def undo(self, whole: torch.Tensor) -> None:
        """Between two stretches of a loop: takes in-place sums back before they overflow."""
        if self._op == "all_reduce":
            patterns.take_back(whole, self._world.size, self.undo_every)

    def check(self, run, whole: torch.Tensor, part: torch.Tensor, ops: int) -> int:
        """Wrong elements after `ops` operations since `prepare`; of a barrier, the ranks it did not wait for."""
        size, share = self._world.size, self._numel // self._world.size
        if self._op == "all_reduce":
            return patterns.count_wrong(whole, patterns.summed_row(size, sums=ops))
        if self._op == "reduce_scatter":
            return patterns.count_wrong(part, patterns.summed_row(size, offset=self._world.rank * share))
        if self._op == "all_gather":
            chunks = whole.view(size, share)
            return sum(patterns.count_wrong(chunks[rank], patterns.row(rank)) for rank in range(size))
        if self._op == "broadcast":
            return patterns.count_wrong(whole, patterns.row(0))
        self._marks += 1
        self._world.gate.mark(self._marks)
        run()
        return sum(mark < self._marks for mark in self._world.gate.marks())


def make_arms(world: World, names: list[str]) -> list:
    arms = []
    if "ours" in names or "ours_plain" in names:
        import gpucomm

        comm = gpucomm.Communicator()
        arms += [Ours(comm, arena=name == "ours") for name in ("ours", "ours_plain") if name in names]
    if "gloo" in names:
        arms.append(Gloo())
    if "mpi" in names and world.launcher == "mpirun":
        arms.append(Mpi())
    return arms


def measure(
    world: World, args: argparse.Namespace, op: str, numel: int, arms: list, buffers: dict
) -> dict[str, Series]:
    """All arms' series for one row, with `memory` (read-modify-write of the first arm's array) among them."""
    cell = Cell(world, op, numel)
    samplers = []
    for arm in arms:
        whole, part = buffers[arm.name].slice(numel, world.size)
        run = arm.op(op, whole, part)
        samplers.append(
            Sampler(
                arm.name,
                prepare=lambda whole=whole, part=part: cell.prepare(whole, part),
                run=run,
                check=lambda ops, run=run, whole=whole, part=part: cell.check(run, whole, part, ops),
                undo=lambda whole=whole: cell.undo(whole),
                undo_every=cell.undo_every,
            )
        )
    if op == "all_reduce" and numel * 4 >= LIMIT_FROM_BYTES:
        array = buffers[arms[0].name].slice(numel, world.size)[0].numpy()
        samplers.append(
            Sampler(
                "memory",
                prepare=lambda: array.fill(1.0),
                run=lambda: np.negative(array, out=array),
                check=lambda ops: int((array != (-1.0) ** ops).sum()),
            )
        )
    sample_us = CROWDED_SAMPLE_US if world.size > len(os.sched_getaffinity(0)) else SAMPLE_US
    round_s = calibrate(world, samplers, sample_us, loop_limits(numel * 4, world.size))
    rounds = rounds_within(world, round_s, 0.1 if args.quick else args.seconds, (4, args.rounds))
    return interleave(world, samplers, rounds)


def loop_limits(numbytes: int, size: int) -> tuple[int, int]:
    """Fewest and most operations in a sample: sums stay exact, and the ranks' release never outweighs a short one."""
    if numbytes >= SINGLE_OP_BYTES:
        return 1, 1
    most = 1 << 14 if patterns.is_power_of_two(size) else patterns.max_sums(size) - 1
    return (LEAST_LOOP if numbytes < LOOP_BELOW_BYTES else 1), most


def report(world: World, record: Record, table: Table, op: str, numel: int, series: dict[str, Series]) -> None:
    numbytes = 0 if op == "barrier" else numel * 4
    limit = numbytes / series["memory"].us.median().item() / 1e3 if "memory" in series else None
    for name, arm in series.items():
        time_us = spread(arm.us)
        speed = algbw(numbytes, time_us["median"]) if numbytes else None
        busbw = speed * busbw_factor(op, world.size) if numbytes and name != "memory" else None
        share = speed / limit if limit and name != "memory" else None
        against = spread(ratio(series["gloo"], arm)) if "gloo" in series and name not in ("gloo", "memory") else None
        record.write(
            bench="transport",
            op=op,
            bytes=numbytes,
            world_size=world.size,
            arm=name,
            dtype="float32",
            us=time_us,
            algbw_gb_s=speed,
            busbw_gb_s=busbw,
            limit_algbw_gb_s=limit,
            limit_share=share,
            gloo_over_arm=against,
            ops_per_sample=arm.ops,
            rounds=len(arm.us),
            wrong=arm.wrong,
        )
        ratios = [against[key] if against else None for key in ("median", "p10", "p90")]
        percent = f"{100 * share:.0f}" if share else None
        times = [time_us[key] for key in ("median", "p10", "p90", "min", "max")]
        heads = [op, size_text(numbytes), world.size, name]
        table.row([*heads, *times, speed, busbw, percent, *ratios, arm.ops, len(arm.us), arm.wrong])


def body(world: World, args: argparse.Namespace) -> None:
    arms = make_arms(world, args.arms)
    numbytes = args.sizes or sizes(QUICK_SIZES if args.quick else SIZES)
    fitting = [size for size in numbytes if fits(size, world.size)]
    most = numel_for("all_gather", max(fitting), world.size)
    buffers = {arm.name: Buffers(arm, most, world.size) for arm in arms if arm.name == "ours"}
    plain = Buffers(Gloo(), most, world.size)  # what is not in the arena is the same memory for all arms
    buffers = {arm.name: buffers["ours"] if arm.name == "ours" else plain for arm in arms}
    libraries = {arm.name: arm.library for arm in arms} | {"memory": "NumPy"}
    record = Record(args.out, launcher=world.launcher, quick=args.quick, libraries=libraries)
    table = Table(COLUMNS)
    if world.rank == 0:
        print(f"\ntimes in us, bandwidths in GB/s, P = {world.size}, ranks started by {world.launcher}")
        table.head()
    for op in args.ops:
        for size in numbytes[:1] if op == "barrier" else numbytes:
            if size not in fitting:
                if world.rank == 0:
                    print(f"{op} {size_text(size)} skipped: arrays of {world.size} ranks would not fit into memory")
                continue
            numel = numel_for(op, size, world.size)
            series = measure(world, args, op, numel, arms, buffers)
            if world.rank == 0:
                report(world, record, table, op, numel, series)
    for arm in arms:
        if isinstance(arm, Ours):
            arm.close()


def fits(numbytes: int, size: int) -> bool:
    """Two pairs of arrays and what gloo and the check allocate beside them, for all ranks, in half of the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return size * numbytes * (2 * (1 + 1 / size) + 1.25) < memory / 2


def sizes(text: str) -> list[int]:
    try:
        return [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def options() -> argparse.ArgumentParser:
    parser = base_parser("Collectives against gloo and Open MPI.", "2,4,8", ARMS)
    parser.add_argument(
        "--ops", type=one_of("operation", OPS), default=list(OPS), help="default: all of " + ",".join(OPS)
    )
    parser.add_argument("--sizes", type=sizes, help=f"default {SIZES}")
    return parser


if __name__ == "__main__":
    main(__file__, options(), body)
