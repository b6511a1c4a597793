"""torch's composable `replicate`, with our class in the place of torch's."""

import copy
import sys

import pytest
import torch
from gradients import mean_gradients
from ranks import run_ranks
from torch.distributed._composable import replicate
from toys import TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours


@pytest.fixture(autouse=True)
def _ours_in_replicate(monkeypatch):
    # The function hides the module of the same name.
    monkeypatch.setattr(sys.modules[replicate.__module__], "DistributedDataParallel", Ours)


def assert_grads(module, expected):
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_gradients_are_the_mean_over_the_ranks():
    def body(rank, world):
        model = mlp()
        module = replicate(copy.deepcopy(model))
        for iteration in range(3):
            module.zero_grad()
            module(batch(rank, iteration, 5, 24)).square().mean().backward()
            losses = lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean()  # noqa: E731
            assert_grads(module, mean_gradients(model, losses, world))

    run_ranks(body, 2)


def test_ranks_start_from_rank_0s_values():
    def body(rank, world):
        model = mlp()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(rank)
        module = replicate(model)
        module(batch(rank, 0, 5, 24))  # it wraps at the first forward
        return [p.detach() for p in module.parameters()]

    for values in run_ranks(body, 2):
        assert all(torch.equal(a, b) for a, b in zip(values, mlp().parameters(), strict=True))


def test_accumulation_without_synchronisation():
    def body(rank, world):
        model = mlp()
        module = replicate(copy.deepcopy(model))
        for iteration in range(3):
            module.zero_grad()
            for k in range(2):
                module.set_requires_gradient_sync(k == 1)
                module(batch(rank, 10 * iteration + k, 5, 24)).square().mean().backward()
            losses = lambda m, r, i=iteration: sum(  # noqa: E731
                m(batch(r, 10 * i + k, 5, 24)).square().mean() for k in range(2)
            )
            assert_grads(module, mean_gradients(model, losses, world))

    run_ranks(body, 2)


def test_ignored_modules_stay_local():
    def body(rank, world):
        module = TwoHeads()
        replicate(module, ignored_modules=[module.heads[0]])
        module(batch(rank, 0, 3, 6)).square().mean().backward()
        return module.heads[0].weight.grad, module.body.weight.grad

    (local_0, body_0), (local_1, body_1) = run_ranks(body, 2)
    assert not torch.equal(local_0, local_1)
    assert torch.equal(body_0, body_1)


def test_state_dict_is_that_of_the_module():
    def body(rank, world):
        module = replicate(mlp())
        module(batch(rank, 0, 5, 24)).square().mean().backward()
        return list(module.state_dict())

    assert run_ranks(body, 2) == [list(mlp().state_dict())] * 2


def test_arguments_reach_the_class():
    def body(rank, world):
        module = replicate(TwoHeads(), find_unused_parameters=True, gradient_as_bucket_view=True)
        for iteration in range(3):
            module(batch(rank, iteration, 3, 6), head=iteration % 2).square().mean().backward()
        return module.heads[1].weight.grad

    first, second = run_ranks(body, 2)
    assert torch.equal(first, second)
