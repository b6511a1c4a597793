"""torch.compile around and inside the wrapper: right gradients, and buckets that reduce while backward runs."""

import copy

import pytest
import torch
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from toys import batch

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel
# Dynamo, its splits at buckets and autograd's part, without a compiler run for every piece.
BACKEND = "aot_eager"
WIDTH = 600  # a layer is larger than the smallest bucket that dynamo splits at, 1 MiB

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Graphs:
    """A backend that counts what it is given to compile."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


class Layers(nn.Module):
    """A class of its own: torch's modules are compiled as parts of others only."""

    def __init__(self, width, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
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


@pytest.mark.parametrize("order", ["compile(ddp)", "ddp(compile)"])
def test_compiled_training_is_that_of_stock_with_as_many_graphs(order):
    """Buckets of 1 MiB: dynamo splits the module at their borders, as it does for stock DDP."""

    def body(rank, world):
        torch.set_num_threads(1)
        arms = []
        for wrapper in (Stock, Ours):
            torch._dynamo.reset()
            model, graphs = Layers(600), Graphs()  # 1.4 MB each
            if order == "compile(ddp)":
                ddp = wrapper(model, bucket_cap_mb=1)
                forward = torch.compile(ddp, backend=graphs)
            else:
                forward = ddp = wrapper(torch.compile(model, backend=graphs), bucket_cap_mb=1)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for iteration in range(3):
                forward(batch(rank, iteration, 4, 600)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            arms.append((graphs.count, [p.detach().clone() for p in ddp.parameters()]))
        (stock_count, stock), (our_count, ours) = arms
        assert our_count == stock_count > 1
        assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))

    run_ranks(body, 2, timeout_s=200)


def test_the_code_around_the_modules_forward_is_not_compiled():
    def body(rank, world):
        torch._dynamo.reset()
        graphs = Graphs()
        model = Layers(4)
        forward = torch.compile(Ours(copy.deepcopy(model)), backend=graphs)
        with torch.no_grad():
            assert torch.equal(forward(torch.ones(2, 4)), model(torch.ones(2, 4)))
        forward(torch.ones(2, 4)).sum().backward()
        assert 1 <= graphs.count <= 2  # the module, without and with gradients

    run_ranks(body, 1, timeout_s=100)
