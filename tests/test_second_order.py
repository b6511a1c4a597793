"""Gradients of reduced gradients: backward(create_graph=True), then a derivative of what `.grad` holds."""

import copy
import gc
import weakref

import pytest
import torch
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from toys import TwoHeads, batch

from gpucomm import DistributedDataParallel as Ours
from gpucomm import StepFailed

TRANSPORTS = ["shm", "c10d"]

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def loss_of(model, rank, iteration=0):
    return model(batch(rank, iteration, 3, 4).double()).square().mean()


def penalty(grads):
    return sum(g.square().sum() for g in grads)


def mean_loss(model, world, iteration=0):
    return sum(loss_of(model, r, iteration) for r in range(world)) / world


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_penalty_on_the_reduced_gradient_has_the_gradient_of_one_process(world, transport):
    def body(rank, world):
        ours = Ours(smooth(), transport=transport, bucket_cap_mb=0.0002)
        for iteration in range(3):
            reference = copy.deepcopy(ours.module)
            grads = torch.autograd.grad(
                mean_loss(reference, world, iteration), list(reference.parameters()), create_graph=True
            )
            expected = torch.autograd.grad(penalty(grads), list(reference.parameters()))
            ours.zero_grad()
            loss_of(ours, rank, iteration).backward(create_graph=True)
            first = [p.grad for p in ours.parameters()]
            for a, b in zip(first, grads, strict=True):
                torch.testing.assert_close(a, b)
            ours.zero_grad()
            penalty(first).backward()
            for p, b in zip(ours.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, b)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, world)


def test_hessian_vector_products_of_the_mean_loss():
    def body(rank, world):
        ours = Ours(smooth())
        params = list(ours.module.parameters())
        reference = copy.deepcopy(ours.module)
        vectors = [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).double() for i, p in enumerate(params)
        ]
        grads = torch.autograd.grad(mean_loss(reference, world), list(reference.parameters()), create_graph=True)
        expected = torch.autograd.grad(grads, list(reference.parameters()), vectors)
        loss_of(ours, rank).backward(create_graph=True)
        products = torch.autograd.grad([p.grad for p in params], params, vectors)
        total = [torch.zeros_like(p) for p in params]
        for mine, out in zip(products, total, strict=True):
            out.copy_(mine)
            torch.distributed.all_reduce(out)
        for out, want in zip(total, expected, strict=True):
            torch.testing.assert_close(out / world, want)

    run_ranks(body, 2)


def test_a_parameter_used_on_one_rank_only_has_the_mean_and_its_derivative():
    def body(rank, world):
        ours = Ours(TwoHeads().double(), find_unused_parameters=True)
        model = copy.deepcopy(ours.module)

        def loss(m, r):
            return m(batch(r, 0, 4, 6).double(), r).square().mean()

        grads = torch.autograd.grad(
            sum(loss(model, r) for r in range(world)) / world, list(model.parameters()), create_graph=True
        )
        expected = torch.autograd.grad(penalty(grads), list(model.parameters()))
        loss(ours, rank).backward(create_graph=True)
        first = [p.grad for p in ours.parameters()]
        ours.zero_grad()
        penalty(first).backward()
        for p, want in zip(ours.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, want)

    run_ranks(body, 2)


def test_iterations_without_a_second_derivative_are_right_and_keep_no_graph():
    def body(rank, world):
        ours = Ours(smooth())
        outputs = []
        for iteration in range(4):
            ours.zero_grad()
            expected = mean_gradients(ours.module, lambda m, r, i=iteration: loss_of(m, r, i), world)
            output = ours(batch(rank, iteration, 3, 4).double())
            outputs.append(weakref.ref(output))
            output.square().mean().backward(create_graph=iteration < 3)
            del output
            assert_mean(ours, expected)
        gc.collect()
        assert [output() for output in outputs] == [None] * 4
        assert not any(p.grad.requires_grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_gradient_that_a_hook_of_the_program_comes_after_keeps_its_graph():
    def body(rank, world):
        ours = Ours(smooth())
        for param in ours.parameters():
            param.register_post_accumulate_grad_hook(lambda param: None)
        model = copy.deepcopy(ours.module)
        grads = torch.autograd.grad(mean_loss(model, world), list(model.parameters()), create_graph=True)
        expected = torch.autograd.grad(penalty(grads), list(model.parameters()))
        loss_of(ours, rank).backward(create_graph=True)
        first = [p.grad for p in ours.parameters()]
        ours.zero_grad()
        penalty(first).backward()
        for p, want in zip(ours.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, want)

    run_ranks(body, 2)


def test_gradients_of_local_backwards_keep_their_graph_though_none_comes_in_the_reduced_one():
    def body(rank, world):
        ours = Ours(TwoHeads().double(), find_unused_parameters=True)
        model = copy.deepcopy(ours.module)

        def loss(m, r, head):
            return m(batch(r, head, 4, 6).double(), head).square().mean()

        total = sum(loss(model, r, head) for r in range(world) for head in (0, 1)) / world
        grads = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
        expected = torch.autograd.grad(penalty(grads), list(model.parameters()))
        with ours.no_sync():
            loss(ours, rank, 0).backward(create_graph=True)
        loss(ours, rank, 1).backward(create_graph=True)
        first = [p.grad for p in ours.parameters()]
        ours.zero_grad()
        penalty(first).backward()
        for p, want in zip(ours.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, want)

    run_ranks(body, 2)


def test_a_graph_beside_a_communication_hook_fails_the_iteration():
    def body(rank, world):
        ours = Ours(smooth())
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(StepFailed, match=r"create_graph=True. beside a communication hook"):
            loss_of(ours, rank).backward(create_graph=True)
        expected = mean_gradients(ours.module, loss_of, world)
        loss_of(ours, rank).backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_graph_after_a_rank_has_joined_fails_the_iteration_on_every_rank():
    def body(rank, world):
        ours = Ours(smooth(), timeout=20)

        def train():
            with ours.join():
                for iteration in range(1 + rank):
                    loss_of(ours, rank, iteration).backward(create_graph=True)

        with pytest.raises(StepFailed, match=r"rank 1: .* after a rank has joined"):
            train()

    run_ranks(body, 2)


def test_accumulated_gradients_keep_their_graph():
    def body(rank, world):
        ours = Ours(smooth())
        model = copy.deepcopy(ours.module)
        total = mean_loss(model, world, 0) + mean_loss(model, world, 1)
        grads = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
        expected = torch.autograd.grad(penalty(grads), list(model.parameters()))
        with ours.no_sync():
            loss_of(ours, rank, 0).backward(create_graph=True)
        loss_of(ours, rank, 1).backward(create_graph=True)
        first = [p.grad for p in ours.parameters()]
        ours.zero_grad()
        penalty(first).backward()
        for p, want in zip(ours.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, want)

    run_ranks(body, 2)
