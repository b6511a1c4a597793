"""torch.compile around and inside the wrapper."""

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn
from toys import batch

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel


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
