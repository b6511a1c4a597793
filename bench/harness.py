"""The harness that the benchmarks share: start P ranks, interleave the arms, time, check, record.

A sample is: prepare (untimed: fill, zero gradients), the gate, one leading operation where the sample is a loop of
several (so that the ranks' release from the gate is not part of it), the timed loop, the check. Each round takes
one sample of every arm; odd rounds take them in reverse order (ABC CBA ...), so drift of the machine falls on all
arms alike and round i of two arms makes a pair.

A sample's time is the last rank's end minus the first rank's start, on the clock that all processes of a host
share. That equals a step that ends in one perfect barrier, for the arms that communicate and for the one that does
not: without it "no communication" would be flattered by the skew of the ranks. Times are gathered after the last
sample.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from gate import Gate
from launch import Hosts, LaunchError, exit_on_sigterm, is_rank, mpi_missing, start_ranks, this_host

_WARM_UP_SAMPLES = 3  # first calls connect, allocate and fault pages in; DDP makes its final buckets after one step
# A single sample under load misjudges an arm by far: the loop grows step by step, each judged by a longer sample.
_CALIBRATION_TURNS = 3
_CALIBRATION_GROWTH = 12


@dataclass
class World:
    """What a rank knows of its process set: torch.distributed (gloo) is initialised, the gate is open."""

    rank: int
    size: int
    gate: Gate
    launcher: str

    def agree(self, number: int) -> int:
        """Rank 0's `number`, on every rank."""
        box = torch.tensor([number])
        dist.broadcast(box, 0)
        return int(box.item())

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every rank, by rank; same shape and dtype everywhere."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values)
        return gathered


@dataclass
class Sampler:
    """One arm in one cell of the table: three functions and the number of operations in a sample."""

    name: str
    prepare: Callable[[], None]
    run: Callable[[], None]
    check: Callable[[int], int]  # given the operations since `prepare`; returns the number of wrong elements
    ops: int = 1
    clock: Callable[[], int] = time.monotonic_ns  # another one only with one rank: ranks' times are compared
    # `undo` takes back `undo_every` operations, between two stretches of a long loop (timed, in every arm); `check` is
    # given the operations that are left.
    undo: Callable[[], object] | None = None
    undo_every: int = 1 << 40

    def sample(self, gate: Gate) -> tuple[int, int, int]:
        """(start, end, wrong elements) of one sample; times in ns of its clock."""
        run, clock, left, undone = self.run, self.clock, self.ops, 0
        self.prepare()
        gate.wait()
        if self.ops > 1:
            run()
        start = clock()
        while True:
            for _ in range(min(left, self.undo_every)):
                run()
            left -= self.undo_every
            if left <= 0 or self.undo is None:
                break
            self.undo()
            undone += self.undo_every
        end = clock()
        return start, end, self.check(self.ops + 1 - undone if self.ops > 1 else 1)


@dataclass
class Series:
    """An arm's samples: microseconds per operation, one per round; wrong elements of all ranks and rounds.

    start_ns: when the first rank began, one per round, on the samplers' clock; None if they were put together since.
    """

    us: torch.Tensor
    wrong: int
    ops: int
    start_ns: torch.Tensor | None = None


def interleave(world: World, samplers: Sequence[Sampler], rounds: int) -> dict[str, Series]:
    """Takes `rounds` samples of every arm in alternating order; the same result on every rank."""
    raw = torch.zeros(len(samplers), rounds, 3, dtype=torch.int64)
    for turn in range(rounds):
        order = range(len(samplers)) if turn % 2 == 0 else reversed(range(len(samplers)))
        for index in order:
            raw[index, turn] = torch.tensor(samplers[index].sample(world.gate))
    by_rank = torch.stack(world.gather(raw))
    first_start, last_end = by_rank[..., 0].amin(0), by_rank[..., 1].amax(0)
    wrong = by_rank[..., 2].sum(dim=(0, 2))
    us = (last_end - first_start) / 1e3
    return {
        sampler.name: Series(us[index] / sampler.ops, int(wrong[index]), sampler.ops, first_start[index])
        for index, sampler in enumerate(samplers)
    }


def calibrate(world: World, samplers: Sequence[Sampler], sample_us: float, limits: tuple[int, int]) -> float:
    """Sets each arm's `ops`, within `limits`, for samples of about `sample_us`; returns the seconds of one round."""
    for sampler in samplers:
        sampler.ops = limits[0]
        for _ in range(_WARM_UP_SAMPLES):
            sampler.sample(world.gate)
        for _ in range(_CALIBRATION_TURNS if limits[1] > limits[0] else 0):
            us = interleave(world, [sampler], 2)[sampler.name].us.min().item()
            sampler.ops = world.agree(
                max(limits[0], min(limits[1], int(sample_us / us), _CALIBRATION_GROWTH * sampler.ops))
            )
    world.gate.wait()
    start = time.monotonic()
    for sampler in samplers:
        sampler.sample(world.gate)
    return time.monotonic() - start


def rounds_within(world: World, round_s: float, seconds: float, limits: tuple[int, int]) -> int:
    """The number of rounds that fill `seconds`, an even number within `limits`, agreed between the ranks."""
    rounds = max(limits[0], min(limits[1], int(seconds / max(round_s, 1e-6))))
    return world.agree(rounds + rounds % 2)


def ratio(slower: Series, faster: Series) -> torch.Tensor:
    """Paired ratios slower/faster, one per round."""
    return slower.us / faster.us


def base_parser(description: str, ranks: str, arms: Sequence[str]) -> argparse.ArgumentParser:
    """The options every benchmark has. Unknown options are errors, abbreviations too."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "--ranks", type=_ranks, default=_ranks(ranks), help=f"world sizes, one set each (default {ranks})"
    )
    parser.add_argument("--arms", type=one_of("arm", arms), help="default: all of " + ",".join(arms))
    parser.set_defaults(known_arms=list(arms))
    parser.add_argument("--seconds", type=float, default=4.0, help="time to spend on one cell of the table")
    parser.add_argument("--rounds", type=int, default=200, help="at most so many samples of each arm in a cell")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="a process set that runs longer is ended")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its numbers mean nothing")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write one JSON record per row (the file is replaced)")
    return parser


def main(
    script: str,
    parser: argparse.ArgumentParser,
    body: Callable[[World, argparse.Namespace], None],
    hosts: Callable[[int], AbstractContextManager[Hosts]] = this_host,
) -> None:
    """The parent starts one process set per world size, on `hosts(size)`; in a rank, calls `body` with the world."""
    args = parser.parse_args()
    named = args.arms is not None
    args.arms = args.arms if named else args.known_arms
    if is_rank():
        _run_rank(args, body)
        return
    missing = mpi_missing() if "mpi" in args.arms else None
    if missing and named:
        parser.error(f"arm mpi: {missing}")
    if missing:
        print(f"arm mpi skipped: {missing}", flush=True)
    with_mpi = "mpi" in args.arms and not missing
    if args.out is not None:
        try:
            open(args.out, "w", encoding="utf-8").close()
        except OSError as error:
            parser.error(f"--out {args.out}: {error.strerror}")
    for size in args.ranks:
        try:
            with exit_on_sigterm(), hosts(size) as places:
                start_ranks(script, sys.argv[1:], places, with_mpi, args.timeout_s)
        except LaunchError as error:
            parser.exit(1, f"{parser.prog}: world size {size}: {error}\n")


def _run_rank(args: argparse.Namespace, body: Callable[[World, argparse.Namespace], None]) -> None:
    env = os.environ
    size = int(env["GPUCOMM_BENCH_SIZE"])
    rank = int(env["OMPI_COMM_WORLD_RANK" if env["GPUCOMM_BENCH_LAUNCHER"] == "mpirun" else "GPUCOMM_BENCH_RANK"])
    timeout = timedelta(seconds=args.timeout_s)
    serves = rank == 0 and env["GPUCOMM_BENCH_STORE_SERVER"] == "rank 0"
    port = int(env["GPUCOMM_BENCH_STORE_PORT"])
    store = dist.TCPStore(env["GPUCOMM_BENCH_STORE_HOST"], port, is_master=serves, timeout=timeout)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    gc.disable()  # a collection inside one arm's sample would be charged to that arm
    try:
        gate = Gate(env["GPUCOMM_BENCH_GATE"], rank, size, args.timeout_s)
        body(World(rank, size, gate, env["GPUCOMM_BENCH_LAUNCHER"]), args)
    finally:
        dist.destroy_process_group()
    # Not through the interpreter's end, where stock DDP's last futures in gloo's threads may abort the process.
    if env["GPUCOMM_BENCH_LAUNCHER"] != "mpirun":
        sys.stdout.flush()
        os._exit(0)


def _ranks(text: str) -> list[int]:
    sizes = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"ranks {text!r}: expected positive world sizes such as 2,4,8")
    return sizes


def one_of(noun: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes a comma-separated choice of `known`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{noun} {name!r}: expected some of {','.join(known)}")
        return chosen

    return parse
