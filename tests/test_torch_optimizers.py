"""torch's sharded and local-SGD optimizers over ours: the same parameters as over stock DDP, bit for bit."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel as StockDDP
from toys import batch, mlp

from gpucomm import DistributedDataParallel

with warnings.catch_warnings():  # torch's own modules warn of torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


def zero(ddp):
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)


def zero_in_buckets(ddp):
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=True, weight_decay=0.1
    )


def post_local_sgd(ddp):
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.new_subgroups(1)[0], start_localSGD_iter=3)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=3)
    return PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=1e-2), averager)


def trained(rank, cls, make, iterations=8):
    ddp = cls(mlp(), bucket_cap_mb=0.001)
    optimizer = make(ddp)
    for iteration in range(iterations):
        optimizer.zero_grad()
        ddp(batch(rank, iteration, 5, 24)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@pytest.mark.parametrize("make", [zero, zero_in_buckets, post_local_sgd])
def test_training_is_that_over_stock(make):
    def body(rank, world):
        untrained = [parameter.detach().clone() for parameter in mlp().parameters()]
        return trained(rank, StockDDP, make), trained(rank, DistributedDataParallel, make), untrained

    for stock, ours, untrained in run_ranks(body, 2):
        for theirs, mine, before in zip(stock, ours, untrained, strict=True):
            assert torch.equal(mine, theirs)
            assert not torch.equal(mine, before)


def test_a_sharded_optimizers_state_is_consolidated():
    def body(rank, world):
        ddp = DistributedDataParallel(mlp())
        optimizer = zero(ddp)
        ddp(batch(rank, 0, 5, 24)).square().mean().backward()
        optimizer.step()
        optimizer.consolidate_state_dict()
        return len(optimizer.state_dict()["state"]) if rank == 0 else None, len(list(ddp.parameters()))

    states, parameters = run_ranks(body, 2)[0]
    assert states == parameters
