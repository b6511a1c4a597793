"""An iteration as the engine does it, over the stand-in for CUDA: each of its orderings is missed when dropped."""

import ctypes

import pytest
import torch
from fake_cuda.program import Program

NUMEL = 200
SEEDS = range(200)


class Iteration:
    """Two gradients are made on a stream each, packed into a bucket, reduced, unpacked and applied, each on a stream of
    its own, and the bucket is used again; `dropped` is the name of the ordering that is forgotten."""

    ORDERINGS = (
        "upload before pack",
        "first producer before pack",
        "second producer before pack",
        "pack before reduce",
        "reduce before unpack",
        "unpack before consumer",
        "unpack before the next pack",
        "consumer before the next unpack",
        "pack before the gradient is freed",
        "consumer before copy",
        "copy before the host reads",
    )
    ROUNDS = 2
    # 2 * (first + second + table) of each round, summed.
    RESULT = [2.0 * (1 + 10 + 1) + 2.0 * (2 + 10 + 1)] * NUMEL

    def __init__(self, program, dropped=None):
        self.program = program
        self.dropped = dropped
        names = ("upload", "first", "second", "pack", "reduce", "unpack", "main", "copy")
        self.streams = {name: program.stream(name) for name in names}
        self.table, self.bucket, self.reduced, self.param = (
            program.allocate(NUMEL, name) for name in ("table", "bucket", "reduced", "param")
        )
        self.others = [program.allocate(NUMEL, f"second gradient {i}") for i in range(self.ROUNDS)]
        self.gradients = [torch.zeros(NUMEL) for _ in range(self.ROUNDS)]
        self.pinned = program.made("cuMemHostAlloc", ctypes.c_size_t(4 * NUMEL), 0)

    def order(self, name, first, then):
        if name != self.dropped:
            self.program.order(self.streams[first], self.streams[then])

    def run(self):
        """What the host reads at the end."""
        p, s, control = self.program, self.streams, self.program.control
        p.fill(self.table, NUMEL, 1.0, s["upload"])
        self.order("upload before pack", "upload", "pack")
        p.fill(self.param, NUMEL, 0.0, s["main"])
        for i in range(self.ROUNDS):
            self.round(i)
        used = [] if self.dropped == "pack before the gradient is freed" else [s["pack"]]
        for gradient in self.gradients:
            control.unregister(gradient.data_ptr(), s["first"], used)
        self.order("consumer before copy", "main", "copy")
        p.copy_to_host(self.pinned, self.param, NUMEL, s["copy"])
        if self.dropped != "copy before the host reads":
            while not p.is_idle(s["copy"]):
                pass
        control.host_access(self.pinned, 4 * NUMEL, False)
        return p.values(self.pinned, NUMEL)

    def round(self, i):
        p, s = self.program, self.streams
        gradient = self.gradients[i].data_ptr()
        p.control.register(gradient, 4 * NUMEL, f"first gradient {i}", s["first"])
        p.fill(gradient, NUMEL, 1.0 + i, s["first"])
        p.fill(self.others[i], NUMEL, 10.0, s["second"])
        self.order("first producer before pack", "first", "pack")
        self.order("second producer before pack", "second", "pack")
        p.copy_kernel(self.bucket, gradient, NUMEL, s["pack"])
        p.axpy(self.bucket, self.others[i], NUMEL, s["pack"])
        p.axpy(self.bucket, self.table, NUMEL, s["pack"])
        self.order("pack before reduce", "pack", "reduce")
        p.axpy(self.bucket, self.bucket, NUMEL, s["reduce"])
        self.order("reduce before unpack", "reduce", "unpack")
        p.copy(self.reduced, self.bucket, NUMEL, s["unpack"])
        self.order("unpack before consumer", "unpack", "main")
        self.order("unpack before the next pack", "unpack", "pack")
        p.axpy(self.param, self.reduced, NUMEL, s["main"])
        self.order("consumer before the next unpack", "main", "unpack")


def test_a_correct_program_is_right_in_every_order_and_nothing_is_reported(fake_cuda):
    for seed in SEEDS:
        fake_cuda.reset()
        fake_cuda.order("random", seed)
        with Program(fake_cuda) as program:
            assert Iteration(program).run() == Iteration.RESULT
            assert fake_cuda.drain()
            assert fake_cuda.errors() == []


@pytest.mark.parametrize("dropped", Iteration.ORDERINGS)
def test_a_dropped_ordering_is_reported_in_every_order(fake_cuda, dropped):
    schedules = [("earliest", 0), ("latest", 0)] + [("random", seed) for seed in range(10)]
    for order, seed in schedules:
        fake_cuda.reset()
        fake_cuda.order(order, seed)
        with Program(fake_cuda) as program:
            Iteration(program, dropped).run()
            fake_cuda.drain()
            assert fake_cuda.reports("race", "memory"), f"missed in order {order}, seed {seed}"
        fake_cuda.clear_reports()


@pytest.mark.parametrize("dropped", [name for name in Iteration.ORDERINGS if "freed" not in name])
def test_values_are_wrong_in_some_order_without_an_ordering(fake_cuda, dropped):
    results = set()
    for seed in range(40):
        fake_cuda.reset()
        fake_cuda.order("random", seed)
        with Program(fake_cuda) as program:
            results.add(Iteration(program, dropped).run() == Iteration.RESULT)
            fake_cuda.drain()
        fake_cuda.clear_reports()
    assert False in results


def test_a_run_follows_from_its_seed(fake_cuda):
    def result(seed):
        fake_cuda.reset()
        fake_cuda.order("random", seed)
        with Program(fake_cuda) as program:
            values = str(Iteration(program, "first producer before pack").run())
            fake_cuda.drain()
        texts = [report.text for report in fake_cuda.reports()]
        fake_cuda.clear_reports()
        return values, texts

    assert [result(seed) for seed in range(20)] == [result(seed) for seed in range(20)]
