"""Parameters that get no gradient: found without a walk through the graph, and without holding up the others."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gradients import assert_mean, mean_gradients
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import batch

from gpucomm import DistributedDataParallel as Ours

TRANSPORTS = ["shm", "c10d"]
TINY_BUCKETS = 0.0001


class Skipping(nn.Module):
    """A chain of layers; those whose numbers are given are left out."""

    def __init__(self, depth=6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x, without=(), reentrant=False):
        x = x.requires_grad_(reentrant)
        for number, layer in enumerate(self.layers):
            if number in without:
                continue
            x = checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)
            x = torch.tanh(x)
        return x


def left_out(rank, iteration):
    return (2 + (rank + iteration) % 3,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_that_vary_between_ranks_and_iterations_get_the_mean(transport):
    def body(rank, world):
        ours = Ours(Skipping(), find_unused_parameters=True, transport=transport, bucket_cap_mb=TINY_BUCKETS)
        for iteration in range(8):

            def loss(m, r, i=iteration):
                return m(batch(r, i, 3, 8), left_out(r, i)).square().mean()

            expected = mean_gradients(ours.module, loss, world)
            ours.zero_grad()
            loss(ours, rank).backward()
            assert_mean(ours, expected)
            assert {n for n, p in ours.module.named_parameters() if p.grad is not None} == set(expected)

    run_ranks(body, 3)


def test_the_slots_behind_an_unused_one_do_not_wait_for_the_end_of_backward():
    def body(rank, world):
        ours = Ours(Skipping(), find_unused_parameters=True, transport="shm", bucket_cap_mb=TINY_BUCKETS)
        for iteration in range(6):
            ours.zero_grad()
            ours(batch(rank, iteration, 3, 8), left_out(rank, iteration)).square().mean().backward()
        events = [e for e in ours.trace() if e.iteration == 6]
        last_ready = max(e.begin_ns for e in events if e.kind == "ready")
        launched = {e.id: e.begin_ns for e in events if e.kind == "reduce"}
        plan = ours._reduction.plan.buckets
        names = ours._reduction.names
        early = [names[s.parameter] for i, b in enumerate(plan) for s in b.slots if launched[i] < last_ready]
        # Layer 2, which rank 0 did not use in the first iteration, lies last in the plan.
        assert {f"layers.{n}.weight" for n in (1, 3, 4, 5)} <= set(early)

    run_ranks(body, 2)


def test_gradients_accumulated_before_are_reduced_though_none_comes_in_the_last_backward():
    def body(rank, world):
        ours = Ours(Skipping(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
        for iteration in range(6):

            def loss(m, r, micro, i=iteration):
                return m(batch(r, i + 10 * micro, 3, 8), left_out(r, i + micro)).square().mean()

            expected = mean_gradients(ours.module, lambda m, r, f=loss: f(m, r, 0) + f(m, r, 1), world)
            ours.zero_grad()
            with ours.no_sync():
                loss(ours, rank, 0).backward()
            loss(ours, rank, 1).backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_gradients_that_come_from_inside_reentrant_checkpoints_are_right_though_not_forecast():
    def body(rank, world):
        ours = Ours(Skipping(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
        for iteration in range(8):

            def loss(m, r, i=iteration):
                return m(batch(r, i, 3, 8), left_out(r, i), i % 2 == 0 and i > 2).square().mean()

            model = copy.deepcopy(ours.module)
            expected = mean_gradients(model, loss, world)
            ours.zero_grad()
            loss(ours, rank).backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


@pytest.mark.parametrize("kept", ["accumulated", "reduced"])
def test_a_gradient_that_was_not_forecast_is_added_once_to_what_was_there_before(kept):
    def body(rank, world):
        ours = Ours(Skipping(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
        for iteration in range(8):

            def first(m, r, i=iteration):
                return m(batch(r, 2 * i, 3, 8)).square().mean()

            def second(m, r, i=iteration):
                return m(batch(r, 2 * i + 1, 3, 8), left_out(r, i), i > 2).square().mean()

            expected = mean_gradients(ours.module, lambda m, r, a=first, b=second: a(m, r) + b(m, r), world)
            ours.zero_grad()
            with ours.no_sync() if kept == "accumulated" else nullcontext():
                first(ours, rank).backward()
            second(ours, rank).backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_gradients_kept_from_before_stay_where_nobody_uses_the_parameter():
    def body(rank, world):
        ours = Ours(Skipping(), find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS)
        for iteration in range(6):
            before = {n: p.grad.clone() for n, p in ours.module.named_parameters() if p.grad is not None}
            without = (2 + iteration % 3,)  # the same on both ranks
            for name, param in ours.module.named_parameters():
                if not name.startswith(f"layers.{without[0]}."):
                    param.grad = None
            ours(batch(rank, iteration, 3, 8), without).square().mean().backward()
            for name, param in ours.module.named_parameters():
                if name.startswith(f"layers.{without[0]}.") and name in before:
                    assert torch.equal(param.grad, before[name])

    run_ranks(body, 2)


class Undefined(torch.autograd.Function):
    """Its backward gives no gradient for the second input."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_an_undefined_gradient_counts_as_zeros_unless_unused_parameters_are_looked_for():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x if dist.get_rank() == 0 else None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return Scaled.apply(self.first(x), self.weight)

    def body(rank, world):
        ours, stock = Ours(Net()), nn.parallel.DistributedDataParallel(Net())
        stock.load_state_dict(ours.state_dict())
        for iteration in range(3):
            for ddp in (ours, stock):
                ddp.zero_grad()
                ddp(batch(rank, iteration, 5, 3)).square().sum().backward()
            for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)

    run_ranks(body, 2)


def test_a_parameter_whose_gradient_is_undefined_is_an_unused_one():
    def body(rank, world):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.used, self.undefined = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                return Undefined.apply(self.used(x), self.undefined.weight)

        ours = Ours(Net(), find_unused_parameters=True)
        for iteration in range(3):
            expected = mean_gradients(
                ours.module, lambda m, r, i=iteration: m(batch(r, i, 3, 8)).square().mean(), world
            )
            ours.zero_grad()
            ours(batch(rank, iteration, 3, 8)).square().mean().backward()
            assert_mean(ours, expected)
            assert ours.module.undefined.weight.grad is None

    run_ranks(body, 2)
