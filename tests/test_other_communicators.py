"""DistributedDataParallel beside another communicator on the same GPU, as torch's for tensor or pipeline parallelism.

The stand-in for NCCL reports launches of two communicators that come in another order on a peer, and collectives that
wait for each other where the device has room for few (`slots`).
"""

import contextlib
import itertools

import pytest
import torch
from fake_cuda.nccl import Nccl, UniqueId
from fake_cuda.ranks import on_gpu
from gradients import same_on_all_ranks
from ranks import run_ranks

from gpucomm import DistributedDataParallel as Ours
from gpucomm import NcclOptions

WIDTH = 16
ROOMY, CROWDED = "slots n=2", "slots n=1"


@pytest.fixture(autouse=True)
def stand_in(fake_cuda):
    """Built before the ranks are forked; skips where there is no compiler."""


class Others:
    """A communicator with a stream of its own, ordered with the program's by events, as torch's process group is."""

    def __init__(self, shim, rank, world):
        self.shim, self.rank, self.world = shim, rank, world
        self.nccl = Nccl(shim.control)
        made = [bytes(self.nccl.unique_id().bytes)] if rank == 0 else [None]
        torch.distributed.broadcast_object_list(made, src=0)
        self.comm = self.nccl.init(UniqueId.from_buffer_copy(made[0]), rank, world)
        self.stream = shim.program.stream("stream of the other communicator")

    def all_reduce(self, x):
        """In place; the program's stream goes on after it."""
        self.start(x)
        self.wait()
        return x

    def broadcast(self, x, root):
        self._follow(x)
        self.nccl.broadcast(x, x, root, self.comm, self.stream)
        self.wait()
        return x

    def start(self, x):
        self._follow(x)
        self.nccl.all_reduce(x, x, "sum", self.comm, self.stream)

    def wait(self):
        self.shim.control.wait_stream(self.shim.current, self.stream)

    def _follow(self, x):
        self.shim.control.wait_stream(self.stream, self.shim.current)
        self.shim.record_stream(x, self.stream)

    def close(self):
        self.shim.synchronize()
        self.nccl.call("ncclCommDestroy", self.comm)


@contextlib.contextmanager
def beside_others(rank, world, script=ROOMY, order="random", seed=0):
    with on_gpu(rank, world, script=script, order=order, seed=seed) as shim:
        others = Others(shim, rank, world)
        yield others
        shim.control.drain()
        others.close()


class InForward(torch.autograd.Function):
    """Sums in forward, as after a layer that is split by rows."""

    @staticmethod
    def forward(ctx, x, others):
        return others.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class InBackward(torch.autograd.Function):
    """Sums in backward, as before a layer that is split by columns."""

    @staticmethod
    def forward(ctx, x, others):
        ctx.others = others
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.others.all_reduce(grad.clone()), None


class HandedOn(torch.autograd.Function):
    """Activations of one rank go to the other in forward, gradients come back in backward, as between stages."""

    @staticmethod
    def forward(ctx, x, others):
        ctx.others = others
        return others.broadcast(x.clone(), 0)

    @staticmethod
    def backward(ctx, grad):
        return ctx.others.broadcast(grad.clone(), 1), None


class Parallel(torch.nn.Module):
    """Layers with collectives of the other communicator around each; layers in `skipped` are left out."""

    def __init__(self, others, depth=5):
        super().__init__()
        torch.manual_seed(0)
        self.others = others
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.skipped = ()

    def forward(self, x, kinds=(InBackward, InForward)):
        for index, layer in enumerate(self.layers):
            x = kinds[0].apply(x, self.others)
            if index not in self.skipped:
                x = layer(x).tanh()
            x = kinds[-1].apply(x, self.others)
        return x


class Alone:
    """What the other communicator gives where all ranks bring the same."""

    def __init__(self, world):
        self.world = world

    def all_reduce(self, x):
        return x.mul_(self.world)

    def broadcast(self, x, root):
        return x


def batch(iteration):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(iteration))


def train(ours, iterations, kinds=(InBackward, InForward), skips=lambda iteration: ()):
    for iteration in range(iterations):
        ours.zero_grad()
        ours.module.skipped = skips(iteration)
        ours(batch(iteration), kinds).square().mean().backward()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", [(InBackward, InForward), (HandedOn,)], ids=["tensor parallel", "pipeline"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_all_is_launched_in_one_order_and_gradients_are_right(wire_dtype, kinds, seed):
    def body(rank, world):
        reference = Parallel(Alone(world))
        reference(batch(3), kinds).square().mean().backward()  # the same on all ranks, so the mean is it
        with beside_others(rank, world, seed=seed) as others:
            ours = Ours(Parallel(others), bucket_cap_mb=0.001, wire_dtype=wire_dtype)
            train(ours, 4, kinds)
            tolerance = {"rtol": 2**-6, "atol": 1e-3} if wire_dtype else {}
            for (name, param), mine in zip(reference.named_parameters(), ours.module.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, param.grad, **tolerance, msg=lambda text, name=name: name + text)
            launches_in_backward(ours)

    run_ranks(body, 2)


def launches_in_backward(ours):
    """How many buckets of the last iteration were launched before the last gradient was ready."""
    last = ours._reduction.engine.iteration
    events = [event for event in ours.trace() if event.iteration == last]
    last_ready = max(event.begin_ns for event in events if event.kind == "ready")
    return sum(event.kind == "reduce" and event.begin_ns < last_ready for event in events)


def test_the_one_order_holds_on_the_device_where_nccl_is_asked_to_keep_it(monkeypatch):
    """With room for one collective, the device would else begin with either."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

    def body(rank, world):
        with beside_others(rank, world, CROWDED, order=("earliest", "latest")[rank]) as others:
            ours = Ours(Parallel(others), bucket_cap_mb=0.001)
            train(ours, 3)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def rules(shim):
    shim.control.drain()
    found = {report.text.split("[")[1].split("]")[0] for report in shim.control.reports("misuse")}
    shim.control.clear_reports()
    return found


def test_a_program_that_launches_in_another_order_on_one_rank_is_found_out():
    def body(rank, world):
        with beside_others(rank, world) as others:
            ours = Ours(Parallel(Alone(1)), bucket_cap_mb=0.001)
            train(ours, 2)
            x = torch.ones(WIDTH)
            if rank == 0:
                others.start(x)
            train(ours, 1)
            if rank == 1:
                others.start(x)
            others.wait()
            return rules(others.shim)

    assert run_ranks(body, 2) == [{"launch-order"}] * 2


def skips_on_one_rank(rank):
    """The last layer, whose gradients are the first: on the other rank its bucket is launched at once."""
    return lambda iteration: (4,) if rank == 1 and iteration > 1 else ()


def test_what_one_rank_alone_uses_keeps_the_order_where_buckets_wait_for_the_end_of_backward():
    def body(rank, world, overlap):
        with beside_others(rank, world) as others:
            ours = Ours(Parallel(others), bucket_cap_mb=0.001, find_unused_parameters=True, overlap=overlap)
            train(ours, 4, skips=skips_on_one_rank(rank))
            same_on_all_ranks(p.grad for p in ours.parameters())
            return rules(others.shim), launches_in_backward(ours)

    overlapping, waiting = (run_ranks(body, 2, overlap) for overlap in (True, False))
    assert [found for found, _ in overlapping] == [{"launch-order"}] * 2  # what the argument is for
    assert [found for found, _ in waiting] == [set()] * 2
    assert overlapping[0][1] > 0
    assert [launched for _, launched in waiting] == [0, 0]


class FirstGradientDiffers(torch.nn.Module):
    """One rank alone uses the layer whose gradient comes first, before a collective of the program's. Gradients come in
    another order than parameters do, so that the second iteration has buckets of other sizes."""

    def __init__(self, others, uses_tail):
        super().__init__()
        torch.manual_seed(0)
        self.others, self.uses_tail = others, uses_tail
        self.widened = torch.nn.Linear(WIDTH + 5, WIDTH)
        self.tail = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH + 5)

    def forward(self, x):
        x = InBackward.apply(self.widened(self.middle(self.head(x))), self.others)
        return self.tail(x) if self.uses_tail else x


@pytest.mark.parametrize("nccl_options", [None, NcclOptions(register_buffers=True)], ids=["", "registered"])
def test_a_new_plan_launches_nothing_early_where_buckets_wait_for_the_end_of_backward(nccl_options):
    def body(rank, world):
        with beside_others(rank, world) as others:
            model = FirstGradientDiffers(others, uses_tail=rank == 1)
            ours = Ours(
                model, bucket_cap_mb=0.0025, find_unused_parameters=True, overlap=False, nccl_options=nccl_options
            )
            sizes = {bucket.numel for bucket in ours._reduction.plan.buckets}
            for iteration in range(4):
                ours.zero_grad()
                ours(batch(iteration)).square().mean().backward()
            assert {bucket.numel for bucket in ours._reduction.plan.buckets} - sizes
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_buckets_wait_by_themselves_where_ranks_may_differ_and_the_group_is_a_part_of_all():
    def body(rank, world):
        mine = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        found = []
        with on_gpu(rank, world):
            for group, arguments in itertools.product(
                (mine, None),
                ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"overlap": True, "static_graph": True}),
            ):
                ours = Ours(Parallel(Alone(1)), process_group=group, bucket_cap_mb=0.001, **arguments)
                train(ours, 2)
                found.append(launches_in_backward(ours) > 0)
        return found

    assert run_ranks(body, 4) == [[True, False, False, True, True, True, True, True]] * 4
