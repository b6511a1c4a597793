"""Gradients that are infinite or not numbers, by policy."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gradients import same_on_all_ranks
from ranks import run_ranks
from torch import nn
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm import NonFinite

TRANSPORTS = ["shm", "c10d"]


def poison(ddp, name, value):
    """From now on, that parameter's gradient gets the value in one element; returns what takes it away."""

    def hook(grad):
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return ddp.module.get_parameter(name).register_hook(hook)


def train_on(ddp, rank, iteration):
    ddp(batch(rank, iteration, 5, 24)).square().mean().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_raise_names_rank_parameter_and_iteration_everywhere_and_the_next_iteration_works(value, transport):
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="raise", transport=transport)
        train_on(ours, rank, 0)
        ours.zero_grad()
        poisoned = poison(ours, "2.weight", value) if rank == 1 else None
        with pytest.raises(NonFinite, match=r"iteration 2: the gradient of parameter '2\.weight' on rank 1") as caught:
            train_on(ours, rank, 1)
        assert (caught.value.ranks, caught.value.parameter, caught.value.iteration) == ([1], "2.weight", 2)
        if poisoned:
            poisoned.remove()
        ours.zero_grad()
        train_on(ours, rank, 2)
        assert all(p.grad.isfinite().all() for p in ours.parameters())

    run_ranks(body, 3)


def test_skip_leaves_parameters_and_moments_alone_on_all_ranks():
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
        for iteration in range(3):
            before = copy.deepcopy((list(ours.parameters()), optimizer.state_dict()))
            poisoned = poison(ours, "0.bias", float("nan")) if rank == 0 and iteration == 1 else None
            train_on(ours, rank, iteration)
            optimizer.step()
            optimizer.zero_grad()
            if poisoned:
                poisoned.remove()
            unchanged = all(torch.equal(a, b) for a, b in zip(before[0], ours.parameters(), strict=True))
            assert unchanged == (iteration == 1)
            if iteration == 1:
                assert str(before[1]) == str(optimizer.state_dict())
        assert ours._reduction.finite.skipped == 1
        same_on_all_ranks(ours.parameters())

    run_ranks(body, 2)


def test_skip_keeps_a_grad_scaler_consistent():
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for iteration in range(3):
            poisoned = poison(ours, "0.weight", float("inf")) if rank == 1 and iteration == 1 else None
            scaler.scale(ours(batch(rank, iteration, 5, 24)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            if poisoned:
                poisoned.remove()
        assert scales == [1024.0, 512.0, 512.0]
        same_on_all_ranks(ours.parameters())

    run_ranks(body, 2)


def test_a_sum_that_overflows_is_told_from_a_rank_that_is_not_finite():
    def body(rank, world):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.zeros(4, dtype=torch.float16))

            def forward(self):
                return (self.w * 60000.0).sum()

        ours = Ours(Net(), nonfinite="raise")
        with pytest.raises(NonFinite, match="'w' of the ranks together is not finite") as caught, ours.weight(0.5):
            ours().backward()  # the sum over both, over a weight of 1, is 120000
        assert caught.value.ranks == []

    run_ranks(body, 2)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_communication_hook_that_overflows_is_noticed_on_every_rank(policy):
    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), nonfinite=policy)
        ours.register_comm_hook(None, fp16_on_rank_1)
        optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
        before = ours.module.weight.detach().clone()
        with pytest.raises(NonFinite, match="'weight' of the ranks together") if policy == "raise" else nullcontext():
            (ours(torch.ones(1, 1)) * 1e5).sum().backward()
        optimizer.step()
        assert torch.equal(before, ours.module.weight)

    run_ranks(body, 2)


def fp16_on_rank_1(state, bucket):
    narrow = bucket.buffer() if dist.get_rank() == 0 else bucket.buffer().half().float()
    future = torch.futures.Future()
    future.set_result(narrow)
    return future


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_skipped_ends_with_the_gradients_that_were_not_finite(set_to_none):
    """Then the ranks train on their own for a while, as local SGD does."""

    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        poisoned = poison(ours, "2.weight", float("nan")) if rank == 1 else None
        train_on(ours, rank, 0)
        if poisoned:
            poisoned.remove()
        changed = []
        for iteration in (1, 2):
            before = copy.deepcopy(list(ours.parameters()))
            with ours.no_sync():
                train_on(ours, rank, iteration)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            changed.append(not all(map(torch.equal, before, ours.parameters())))
        assert changed == [False, True]

    run_ranks(body, 2)


def test_pass_hands_on_what_comes():
    def body(rank, world):
        ours = Ours(mlp())
        if rank == 1:
            poison(ours, "0.weight", float("nan"))
        train_on(ours, rank, 0)
        assert ours.module[0].weight.grad.view(-1)[-1].isnan()
        assert ours.module[0].weight.grad.isnan().sum() == 1

    run_ranks(body, 2)


def test_the_variable_switches_it_on_and_the_argument_wins(monkeypatch):
    monkeypatch.setenv("GPUCOMM_NONFINITE", "raise")

    def body(rank, world):
        for argument, raises in ((None, True), ("pass", False)):
            ours = Ours(nn.Linear(2, 1), nonfinite=argument)
            loss = ours(torch.full((1, 2), float("nan"))).sum()
            if raises:
                with pytest.raises(NonFinite):
                    loss.backward()
            else:
                loss.backward()

    run_ranks(body, 1)


def test_another_policy_is_refused_with_those_that_there_are(monkeypatch):
    def body(rank, world):
        with pytest.raises(ValueError, match="nonfinite is 'explode', accepted are pass, raise, skip"):
            Ours(nn.Linear(2, 1), nonfinite="explode")
        monkeypatch.setenv("GPUCOMM_NONFINITE", "1")
        with pytest.raises(ValueError, match="GPUCOMM_NONFINITE is '1', accepted are pass, raise, skip"):
            Ours(nn.Linear(2, 1))

    run_ranks(body, 1)


def test_sparse_gradients_and_those_of_the_second_round_are_looked_at():
    def body(rank, world):
        ours = Ours(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), nonfinite="raise")
        if rank == 1:
            poison_sparse = ours.module[0].weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(NonFinite, match=r"'0\.weight'"):
            ours(torch.arange(5)).sum().backward()
        if rank == 1:
            poison_sparse.remove()
        ours.zero_grad()
        ours(torch.arange(5)).sum().backward()

    run_ranks(body, 2)


@pytest.mark.parametrize("by_name", [False, True])
def test_skip_holds_for_gradients_that_a_closure_makes_inside_the_step(by_name):
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for iteration in range(3):
            before = copy.deepcopy(list(ours.parameters()))
            poisoned = poison(ours, "0.weight", float("nan")) if rank == 1 and iteration == 1 else None

            def closure(iteration=iteration):
                optimizer.zero_grad()
                loss = ours(batch(rank, iteration, 5, 24)).square().mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            assert loss.isfinite()
            if poisoned:
                poisoned.remove()
            equal = all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))
            assert equal == (iteration == 1)
        same_on_all_ranks(ours.parameters())

    run_ranks(body, 2)


def test_skip_leaves_gradients_alone_that_the_program_sets_after_the_skipped_iteration():
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
        poisoned = poison(ours, "0.weight", float("nan"))
        train_on(ours, rank, 0)
        poisoned.remove()
        optimizer.step()
        before = copy.deepcopy(list(ours.parameters()))
        for set_to_none in (True, False):
            optimizer.zero_grad(set_to_none)
            for param in ours.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        for a, b in zip(before, ours.parameters(), strict=True):
            torch.testing.assert_close(b, a - 2.0)

    run_ranks(body, 2)


def test_of_a_skipped_iteration_every_optimizer_leaves_its_parameters_alone():
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        first, *others = ours.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
        poisoned = poison(ours, "0.weight", float("nan")) if rank == 0 else None
        train_on(ours, rank, 0)
        if poisoned:
            poisoned.remove()
        before = copy.deepcopy(list(ours.parameters()))
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))

    run_ranks(body, 2)


def test_skip_beside_an_optimizer_that_steps_bucket_by_bucket_is_refused():
    def body(rank, world):
        ours = Ours(mlp(), nonfinite="skip")
        with pytest.raises(RuntimeError, match="nonfinite='skip' beside an optimizer that steps bucket by bucket"):
            ours._register_fused_optim(torch.optim.SGD, 0.1)

    run_ranks(body, 1)
