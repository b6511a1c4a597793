"""torch.compile around and inside the wrapper: right gradients, and buckets that reduce while backward runs."""

import copy

import pytest
import torch
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from toys import batch

from gpucomm import DistributedDataParallel as Ours

# Dynamo, its splits at buckets and autograd's part, without a compiler run for every piece.
BACKEND = "aot_eager"
WIDTH = 600  # a layer is larger than the smallest bucket that dynamo splits at, 1 MiB

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def deep(width=WIDTH):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())])


def loss_of(model, rank, iteration):
    return model(batch(rank, iteration, 3, WIDTH)).square().mean()


def compiled_outside(model, **options):
    ours = Ours(model, **options)
    return torch.compile(ours, backend=BACKEND), ours


def compiled_inside(model, **options):
    ours = Ours(torch.compile(model, backend=BACKEND), **options)
    return ours, ours


def compiled_in_place(model, **options):
    model.compile(backend=BACKEND)
    ours = Ours(model, **options)
    return ours, ours


ORDERS = [compiled_outside, compiled_inside, compiled_in_place]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_gradients_are_the_mean_and_buckets_reduce_before_backward_ends(order, transport):
    def body(rank, world):
        plain = deep()
        call, ours = order(copy.deepcopy(plain), bucket_cap_mb=1, transport=transport)
        for iteration in range(4):
            expected = mean_gradients(plain, lambda m, r, i=iteration: loss_of(m, r, i), world)
            ours.zero_grad()
            loss_of(call, rank, iteration).backward()
            named = {name.replace("_orig_mod.", ""): p for name, p in ours.module.named_parameters()}
            for name, want in expected.items():
                torch.testing.assert_close(named[name].grad, want, rtol=1e-5, atol=1e-6)
            same_on_all_ranks(p.grad for p in ours.parameters())
        events = [e for e in ours.trace() if e.iteration == 4]
        first_reduce = min(e.begin_ns for e in events if e.kind == "reduce")
        assert first_reduce < max(e.begin_ns for e in events if e.kind == "ready")

    run_ranks(body, 2, timeout_s=200)


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_accumulation_under_no_sync_and_unused_parameters(order):
    def body(rank, world):
        plain = nn.ModuleDict({"used": deep(), "unused": nn.Linear(2, 2)})

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = copy.deepcopy(plain)

            def forward(self, x):
                return self.parts["used"](x)

        call, ours = order(Net(), find_unused_parameters=True)
        for iteration in range(3):
            expected = mean_gradients(
                plain["used"], lambda m, r, i=iteration: loss_of(m, r, i) + loss_of(m, r, i + 9), world
            )
            ours.zero_grad()
            with ours.no_sync():
                loss_of(call, rank, iteration).backward()
            loss_of(call, rank, iteration + 9).backward()
            named = {name.replace("_orig_mod.", ""): p for name, p in ours.module.named_parameters()}
            for name, want in expected.items():
                torch.testing.assert_close(named[f"parts.used.{name}"].grad, want, rtol=1e-5, atol=1e-6)

    run_ranks(body, 2, timeout_s=200)


def test_a_compiled_function_that_calls_the_wrapper():
    def body(rank, world):
        plain = deep()
        ours = Ours(copy.deepcopy(plain))
        loss = torch.compile(lambda x: ours(x).square().mean(), backend=BACKEND)
        for iteration in range(3):
            expected = mean_gradients(plain, lambda m, r, i=iteration: loss_of(m, r, i), world)
            ours.zero_grad()
            loss(batch(rank, iteration, 3, WIDTH)).backward()
            assert_mean(ours, expected, 1e-5)

    run_ranks(body, 2, timeout_s=200)
