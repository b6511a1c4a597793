"""Automatic mixed precision on a GPU, over the stand-ins: autocast and a GradScaler, and what travels in 16 bits."""

import copy

import pytest
import torch
from fake_cuda.ranks import on_gpu
from gradients import same_on_all_ranks
from ranks import run_ranks
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours

Stock = torch.nn.parallel.DistributedDataParallel


@pytest.fixture(autouse=True)
def stand_in(fake_cuda):
    """Built before the ranks are forked; skips where there is no compiler."""


def train(ddp, rank, spoilt):
    """Five iterations; in iteration `spoilt` rank 1 has an infinite loss. What scale and parameters were after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for iteration in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(rank, iteration, 5, 24)).float().square().mean()
        if rank == 1 and iteration == spoilt:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), [p.detach().clone() for p in ddp.parameters()]))
    return seen


@pytest.mark.parametrize("nonfinite", ["pass", "skip"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16])
def test_training_under_autocast_with_a_scaler_is_that_over_stock(wire_dtype, nonfinite):
    spoilt = 2

    def body(rank, world):
        model = mlp()
        expected = train(Stock(copy.deepcopy(model)), rank, spoilt)
        with on_gpu(rank, world):
            ours = Ours(model, bucket_cap_mb=0.001, nonfinite=nonfinite, wire_dtype=wire_dtype)
            seen = train(ours, rank, spoilt)
            same_on_all_ranks(ours.parameters())
            tolerance = {} if wire_dtype is None else {"rtol": 0.02, "atol": 2e-3}
            for (scale, params), (stocks_scale, stocks) in zip(seen, expected, strict=True):
                assert scale == stocks_scale
                for param, stocks_param in zip(params, stocks, strict=True):
                    torch.testing.assert_close(param, stocks_param, **tolerance)
            before, after = seen[spoilt - 1], seen[spoilt]
            assert after[0] < before[0]
            assert all(map(torch.equal, before[1], after[1]))

    run_ranks(body, 2)


def test_a_scale_that_the_wire_cannot_hold_is_lowered_until_it_can():
    """An infinity that only the wire made: every rank finds it, so that all skip and lower their scale alike."""

    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(mlp(), wire_dtype=torch.float16)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
            first = [p.detach().clone() for p in ours.parameters()]
            scales = []
            for iteration in range(12):
                optimizer.zero_grad()
                loss = ours(batch(rank, iteration, 5, 24)).square().mean() * (1.0 if rank else 0.25)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                if scales[-1] == 2.0**22 / 2 ** (iteration + 1):
                    assert all(map(torch.equal, first, ours.parameters()))
            same_on_all_ranks(ours.parameters())
            assert all(bool(p.isfinite().all()) for p in ours.parameters())
            return scales

    mine, theirs = run_ranks(body, 2)
    assert mine == theirs
    assert mine[0] == 2.0**21
    assert mine[-1] == mine[-2] > 1  # from some iteration on it fits
