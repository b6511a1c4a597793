"""Gradients that are the program's own: flat buffers behind `.grad`, lists taken once, hooks that take them away."""

import copy

import pytest
import torch
from gradients import mean_gradients
from ranks import run_ranks
from torch import nn
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm import StepFailed

Stock = nn.parallel.DistributedDataParallel
TRANSPORTS = ["shm", "c10d"]


def loss_of(model, rank, iteration=0):
    return model(batch(rank, iteration, 5, 24)).square().mean()


def views_of_a_flat_buffer(model):
    """One flat tensor, and every parameter's `.grad` a part of it."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for param, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        param.grad = part.view_as(param)
    return flat


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flat_buffer_behind_grad_holds_the_mean_in_every_iteration(transport):
    def body(rank, world):
        ours, stock = Ours(mlp(), transport=transport, bucket_cap_mb=0.001), Stock(mlp())
        flats = [views_of_a_flat_buffer(model) for model in (ours, stock)]
        for iteration in range(4):
            for flat, model in zip(flats, (ours, stock), strict=True):
                flat.zero_()
                loss_of(model, rank, iteration).backward()
            assert torch.equal(*flats)
            at = 0
            for param in ours.parameters():
                assert param.grad.data_ptr() == flats[0][at:].data_ptr()
                at += param.numel()

    run_ranks(body, 2)


def test_gradients_taken_once_and_zeroed_in_place_are_those_of_later_iterations():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=0.001)
        loss_of(ours, rank).backward()
        grads = [p.grad for p in ours.parameters()]
        for iteration in range(1, 4):
            expected = mean_gradients(ours.module, lambda m, r, i=iteration: loss_of(m, r, i), world)
            torch._foreach_zero_(grads)
            loss_of(ours, rank, iteration).backward()
            for grad, param, want in zip(grads, ours.parameters(), expected.values(), strict=True):
                assert param.grad is grad
                torch.testing.assert_close(grad, want)

    run_ranks(body, 2)


def test_gradients_that_nobody_holds_lie_in_the_bucket_after_accumulation():
    def body(rank, world):
        ours = Ours(mlp())
        addresses = []
        for iteration in range(3):
            ours.zero_grad()
            with ours.no_sync():
                loss_of(ours, rank, iteration).backward()
            loss_of(ours, rank, iteration + 9).backward()
            addresses.append([p.grad.data_ptr() for p in ours.parameters()])
        assert addresses[1] == addresses[2]

    run_ranks(body, 2)


@pytest.mark.parametrize("unused", [False, True])
def test_a_hook_that_takes_the_gradient_away_fails_the_iteration_on_all_ranks(unused):
    def body(rank, world):
        model = mlp()
        if rank == 1:

            def step(param):
                param.data.add_(param.grad, alpha=-0.1)
                param.grad = None

            model[0].weight.register_post_accumulate_grad_hook(step)
        ours = Ours(model, find_unused_parameters=unused)
        expected = "took its gradient away" if rank == 1 else r"rank 1: RuntimeError: parameter '0\.weight'"
        with pytest.raises(RuntimeError if rank == 1 else StepFailed, match=expected):
            loss_of(ours, rank).backward()

    run_ranks(body, 2)


@pytest.mark.parametrize("width", [24, 12])
def test_a_layer_replaced_by_one_with_other_values_on_each_rank_fails_until_they_are_equal(width):
    def body(rank, world):
        ours = Ours(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 4)))
        loss_of(ours, rank).backward()
        torch.manual_seed(rank)
        ours.module[1] = nn.Linear(24, width)
        ours.module[2] = nn.Linear(width, 4)
        for _ in range(2):
            ours.zero_grad()
            with pytest.raises(StepFailed, match=r"parameter '1\.weight' was replaced .* values differ between ranks"):
                loss_of(ours, rank).backward()
        with torch.no_grad():
            for param in ours.parameters():
                torch.distributed.broadcast(param, 0)
        model = copy.deepcopy(ours.module)
        for iteration in range(3):
            expected = mean_gradients(model, lambda m, r, i=iteration: loss_of(m, r, i), world)
            ours.zero_grad()
            loss_of(ours, rank, iteration).backward()
            for param, want in zip(ours.parameters(), expected.values(), strict=True):
                torch.testing.assert_close(param.grad, want)

    run_ranks(body, 2)
