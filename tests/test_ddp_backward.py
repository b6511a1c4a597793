"""DistributedDataParallel and what a backward can be: checkpointed, on other threads, with hooks, raising."""

import contextlib
import copy
import functools
import sys
import threading
import warnings

import pytest
import torch
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel

TRANSPORTS = ["shm", "c10d"]


def test_several_forwards_and_several_backwards_are_reduced():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))

        def both(m, r):
            return m(batch(r, 0, 5, 24)).square().mean() + m(batch(r, 1, 5, 24)).mean()

        expected = mean_gradients(model, both, world)
        both(ours, rank).backward()  # two forwards, one backward
        assert_mean(ours, expected)
        ours.zero_grad()
        first, second = ours(batch(rank, 0, 5, 24)).square().mean(), ours(batch(rank, 1, 5, 24)).mean()
        first.backward()
        second.backward()  # two backwards
        assert_mean(ours, expected)
        ours.zero_grad()
        output = ours(batch(rank, 0, 5, 24))
        output.square().mean().backward(retain_graph=True)
        output.mean().backward()  # two backwards of one forward
        expected = mean_gradients(
            model, lambda m, r: m(batch(r, 0, 5, 24)).square().mean() + m(batch(r, 0, 5, 24)).mean(), world
        )
        assert_mean(ours, expected)

    run_ranks(body, 2)


class Reused(nn.Module):
    """The same block under a checkpoint twice, and around it."""

    def __init__(self, reentrant, nested=False):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.block = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant, self.nested = reentrant, nested

    def inner(self, x):
        x = torch.tanh(self.block(x))
        return checkpoint(self.block, x, use_reentrant=self.reentrant) if self.nested else x

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x


# A checkpoint inside another runs its forward without gradients first, and says so.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_block_reused_under_checkpointing_is_reduced_as_late_deltas(reentrant, nested):
    def body(rank, world):
        model = Reused(reentrant, nested)
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0)
        for iteration in range(3):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 6)).square().mean(), world)
            ours(batch(rank, iteration, 5, 6)).square().mean().backward()
            assert_mean(ours, expected)
        assert ours._reduction.engine.iteration == 3

    run_ranks(body, 2)


def test_gradients_that_are_added_to_the_last_means_and_come_in_parts_are_reduced_with_them():
    """Nobody calls zero_grad, so the first part is added to where the mean lies, in the bucket."""

    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)

        def loss(m, r, iteration):
            parts = batch(r, iteration, 6, 24).requires_grad_().split(2)
            return sum(checkpoint(m, part, use_reentrant=True).square().sum() for part in parts)

        total = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
        for iteration in range(4):
            means = mean_gradients(model, lambda m, r, i=iteration: loss(m, r, i), world)
            total = {name: total[name] + means[name] for name in total}
            loss(ours, rank, iteration).backward()
            assert_mean(ours, total)

    run_ranks(body, 2)


def test_the_whole_model_under_a_reentrant_checkpoint_ends_its_backward_once():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))

        def loss(m, r):
            x = batch(r, 0, 5, 24).requires_grad_()
            return checkpoint(m, x, use_reentrant=True).square().mean()

        expected = mean_gradients(model, loss, world)
        loss(ours, rank).backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)


class Meeting(torch.autograd.Function):
    """The identity; its backward calls `meet` first."""

    @staticmethod
    def forward(ctx, x, meet):
        ctx.meet = meet
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.meet()
        return grad, None


def text_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("local", [False, True])
def test_two_backwards_at_once_on_two_threads_are_refused_and_the_iteration_fails_everywhere(transport, local):
    def body(rank, world):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ours = Ours(copy.deepcopy(model), transport=transport, find_unused_parameters=True)
        inside, go_on = threading.Event(), threading.Event()

        def wait():
            inside.set()
            assert go_on.wait(20)

        texts = []
        with ours.no_sync() if local else contextlib.nullcontext():
            first = ours.module[0](
                Meeting.apply(ours.module[1](batch(rank, 0, 3, 4)), wait if rank == 1 else lambda: 0)
            )
            loss = first.square().mean()
            if rank == 1:
                other = ours.module[1](batch(rank, 1, 3, 4)).sum()
                thread = threading.Thread(target=lambda: texts.append(text_of(loss.backward)))
                thread.start()
                assert inside.wait(20)
                texts.append(text_of(other.backward))
                go_on.set()
                thread.join()
            else:
                texts.append(text_of(loss.backward))
        if not local:
            expected = "StepFailed: iteration 1 failed on rank 1: TwoBackwards: two backwards at once"
            assert texts[-1].startswith(expected), texts
        if rank == 1:
            assert "TwoBackwards: two backwards at once" in texts[0], texts
            assert "two backwards at once" in texts[1], texts
        for iteration in range(2):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 4)).square().mean(), world)
            ours(batch(rank, iteration, 5, 4)).square().mean().backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_backward_on_another_thread_than_the_forward_and_the_one_before_is_reduced():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        for iteration in range(4):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world)
            loss = ours(batch(rank, iteration, 5, 24)).square().mean()
            if iteration % 2:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


class Deep(nn.Module):
    """Reentrant checkpoints in each other, deeper than autograd goes on one thread."""

    def __init__(self, depth):
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth))
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.inner(0, x.requires_grad_()))

    def inner(self, level, x):
        threads.add(threading.get_ident())
        x = torch.tanh(self.layers[level](x)) + x
        if level + 1 < len(self.layers):
            x = checkpoint(functools.partial(self.inner, level + 1), x, use_reentrant=True)
        return x


threads = set()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_one_backward_that_moves_between_threads_is_reduced():
    def body(rank, world):
        sys.setrecursionlimit(10000)
        model = Deep(64)
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.0002)
        for iteration in range(2):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 3)).square().mean(), world)
            ours(batch(rank, iteration, 5, 3)).square().mean().backward()
            assert_mean(ours, expected)
        assert len(threads) > 1
        assert ours._reduction.engine.iteration == 2

    run_ranks(body, 2)


def test_a_conjugated_gradient_is_resolved():
    def body(rank, world):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)), nn.Parameter(torch.randn(1))])

        def loss(params, x):
            return ((x.to(torch.complex64) @ params[0].conj()).abs() * params[1]).sum()

        ours = Ours(copy.deepcopy(model))
        for iteration in range(2):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: loss(m, batch(r, i, 3, 4)), world)
            loss(ours.module, batch(rank, iteration, 3, 4)).backward()
            assert_mean(ours, expected, 1e-5)

    run_ranks(body, 2)


def test_hooks_of_the_user_run_as_without_the_wrapper():
    def body(rank, world):
        calls = []
        model = mlp()
        model[0].weight.register_hook(lambda grad: calls.append("before") or grad * 2)
        ours = Ours(model)
        model[2].weight.register_hook(lambda grad: calls.append("after") or grad * 2)
        model[0].bias.register_post_accumulate_grad_hook(lambda p: calls.append("post"))
        plain = mlp()
        expected = mean_gradients(plain, lambda m, r: m(batch(r, 0, 5, 24)).square().mean(), world)
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        torch.testing.assert_close(model[0].weight.grad, 2 * expected["0.weight"])
        torch.testing.assert_close(model[2].weight.grad, 2 * expected["2.weight"])
        return sorted(calls)

    assert run_ranks(body, 2) == [["after", "before", "post"]] * 2


def test_differing_forwards_warn_with_the_counts_of_the_ranks():
    def body(rank, world):
        ours = Ours(mlp())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank == 1:
                ours(batch(rank, 0, 5, 24))
            ours(batch(rank, 0, 5, 24)).square().mean().backward()
        return [str(w.message) for w in caught]

    for messages in run_ranks(body, 2):
        assert any("1 on rank 0, 2 on rank 1" in m for m in messages), messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_warning_that_is_an_error_is_raised_once_the_iteration_is_complete(transport):
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), transport=transport)

        def loss(m, r):
            return m(batch(r, 0, 5, 24)).square().mean()

        expected = mean_gradients(model, loss, world)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=UserWarning, message="training forwards")
            if rank == 1:
                ours(batch(rank, 0, 5, 24))
            with pytest.raises(UserWarning, match="forwards"):
                loss(ours, rank).backward()
        assert_mean(ours, expected)
        ours.zero_grad()
        loss(ours, rank).backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)


def test_differing_backwards_raise_on_every_rank_and_the_next_iteration_works():
    def body(rank, world):
        from gpucomm import StepFailed

        ours = Ours(mlp())
        if rank == 1:
            with ours.no_sync():
                ours(batch(rank, 0, 5, 24)).square().mean().backward()
        with pytest.raises(StepFailed, match="1 on rank 0, 2 on rank 1"):
            ours(batch(rank, 0, 5, 24)).square().mean().backward()
        ours.zero_grad()
        ours(batch(rank, 1, 5, 24)).square().mean().backward()
        same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_raise_in_backward_fails_the_step_everywhere_and_training_goes_on():
    def body(rank, world):
        from gpucomm import StepFailed

        model = mlp()
        ours = Ours(copy.deepcopy(model))
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        bomb = ours.module[2].weight.register_hook(lambda grad: 1 / 0) if rank == 1 else None
        ours.zero_grad()
        # Until Python 3.11 an error of the interpreter's own becomes an exception only when it is caught.
        text = r"rank 1: (ZeroDivisionError: division by zero|raised in backward, in <lambda> \(.*:\d+\))$"
        expected = (ZeroDivisionError, "division") if rank == 1 else (StepFailed, text)
        with pytest.raises(expected[0], match=expected[1]):
            ours(batch(rank, 1, 5, 24)).square().mean().backward()
        if bomb is not None:
            bomb.remove()
        ours.zero_grad()
        expected = mean_gradients(model, lambda m, r: m(batch(r, 2, 5, 24)).square().mean(), world)
        ours(batch(rank, 2, 5, 24)).square().mean().backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)


class Misshapen(torch.autograd.Function):
    """Its backward keeps an exception that it caught, and returns what autograd then refuses."""

    kept = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        try:
            raise KeyError("caught")
        except KeyError as error:
            Misshapen.kept.append(error)
        return torch.ones(77)


def test_an_error_of_autograd_itself_is_not_taken_for_one_that_the_program_caught():
    def body(rank, world):
        from gpucomm import StepFailed

        ours = Ours(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        x = ours.module[0](batch(rank, 0, 3, 4))
        loss = ours.module[1](Misshapen.apply(x) if rank == 1 else x).sum()
        expected = (RuntimeError, "invalid gradient") if rank == 1 else (StepFailed, "rank 1: raised in backward$")
        with pytest.raises(expected[0], match=expected[1]):
            loss.backward()

    run_ranks(body, 2)


def test_hooks_added_after_wrapping_see_the_local_sparse_gradient():
    def body(rank, world):
        ours = Ours(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
        table, seen = ours.module[0].weight, []
        table.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.to_dense()[0, 0].item()))
        for _ in range(2):
            table.grad = None
            (ours(torch.arange(5)).sum() * (rank + 1)).backward()
            assert table.grad.is_sparse
            torch.testing.assert_close(table.grad.to_dense()[0, 0].item(), seen[-1] / (rank + 1) * 1.5)
        assert len(seen) == 2

    run_ranks(body, 2)


def test_hooks_that_the_program_adds_after_wrapping_see_the_local_gradient():
    def body(rank, world):
        grads = []
        for wrapper in (Stock, Ours):
            torch.manual_seed(0)
            model = wrapper(torch.nn.Linear(2, 1))
            seen = []

            def clamp(param, seen=seen):
                seen.append(param.grad.clone())
                param.grad.clamp_(-1, 1)

            for param in model.parameters():
                param.register_post_accumulate_grad_hook(clamp)
            for _ in range(3):
                model.zero_grad()
                model(torch.full((1, 2), 5.0 * (rank + 1))).sum().backward()
            grads.append([seen, [p.grad.clone() for p in model.parameters()]])
        (seen_stock, stock), (seen_ours, ours) = grads
        assert all(torch.equal(a, b) for a, b in zip(seen_stock, seen_ours, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
        assert torch.equal(ours[0], torch.ones(1, 2))

    run_ranks(body, 2)


def test_a_forward_past_the_wrapper_after_a_local_backward_is_reduced():
    def body(rank, world):
        ours = Ours(mlp())

        def loss(model, r, iteration):
            return model(batch(r, iteration, 3, 24)).square().mean()

        expected = mean_gradients(ours.module, lambda m, r: loss(m, r, 0) + loss(m, r, 1), world)
        with ours.no_sync():
            loss(ours, rank, 0).backward()
        loss(ours.module, rank, 1).backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)
