"""Which mean gradients become: weighted by samples or tokens, sparse, and over ranks of which some ran out of data."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gradients import assert_mean, dense, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from toys import ConvNet, TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm import StepFailed

Stock = nn.parallel.DistributedDataParallel
TRANSPORTS = ["shm", "c10d"]


def samples(rank, micro):
    """A micro-batch of a size of its own: 1 to 6 rows."""
    return batch(rank, micro, 1 + (3 * rank + 5 * micro) % 6, 24)


def summed_loss(model, x):
    return model(x).square().sum()


# ---- weighted


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_weighted_gradients_are_those_of_one_process_on_everything_together(world, transport):
    def body(rank, world):
        ours = Ours(mlp(), transport=transport, bucket_cap_mb=0.001)
        for iteration in range(3):
            micro_batches = {r: [samples(r, 10 * iteration + m) for m in range(1 + r)] for r in range(world)}
            everything = torch.cat([x for parts in micro_batches.values() for x in parts])
            reference = copy.deepcopy(ours.module).double()
            reference.zero_grad()
            (summed_loss(reference, everything.double()) / len(everything)).backward()
            ours.zero_grad()
            for number, x in enumerate(micro_batches[rank]):
                ours.require_backward_grad_sync = number == rank
                with ours.weight(len(x)):
                    summed_loss(ours, x).backward()
            for a, b in zip(ours.module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-6)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, world)


def test_weights_take_tensors_and_numbers_and_refuse_what_is_no_count():
    def body(rank, world):
        ours = Ours(nn.Linear(2, 1, bias=False))
        with ours.weight(torch.tensor(3)), ours.weight(1.0):
            ours(torch.ones(1, 2)).sum().backward()
        torch.testing.assert_close(ours.module.weight.grad, torch.full((1, 2), 0.25))
        for wrong, error in ((-1, ValueError), (float("nan"), ValueError), ("3", TypeError), (True, TypeError)):
            with pytest.raises(error, match="accepted is a number of samples or tokens"), ours.weight(wrong):
                pass

    run_ranks(body, 1)


def test_the_weight_of_a_micro_batch_whose_gradients_are_dropped_does_not_count():
    def body(rank, world):
        ours = Ours(mlp())
        reference = copy.deepcopy(ours.module)
        for _ in range(2):
            with ours.no_sync(), ours.weight(5):
                summed_loss(ours, samples(rank, 0)).backward()
            ours.zero_grad()
            micro = [samples(r, 1) for r in range(world)]
            with ours.weight(len(micro[rank])):
                summed_loss(ours, micro[rank]).backward()
            reference.zero_grad()
            (summed_loss(reference, torch.cat(micro)) / sum(map(len, micro))).backward()
            for a, b in zip(ours.module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
            ours.zero_grad()

    run_ranks(body, 2)


def test_an_iteration_in_which_only_some_ranks_give_weights_fails_on_all():
    def body(rank, world):
        ours = Ours(mlp())
        for failing in (True, False):
            with ours.weight(2) if rank == 0 or not failing else nullcontext():
                loss = summed_loss(ours, samples(rank, 0))
                if failing:
                    with pytest.raises(StepFailed, match=r"rank\(s\) \[1\] gave no weight"):
                        loss.backward()
                else:
                    loss.backward()
            ours.zero_grad()

    run_ranks(body, 2)


def test_weights_that_add_up_to_nothing_fail_on_all():
    def body(rank, world):
        ours = Ours(mlp())
        with ours.weight(0), pytest.raises(StepFailed, match="add up to 0"):
            summed_loss(ours, samples(rank, 0)).backward()

    run_ranks(body, 2)


def test_a_micro_batch_whose_forward_raises_has_no_weight():
    def body(rank, world):
        ours = Ours(mlp())
        for iteration in range(2):
            total = sum(len(samples(r, iteration)) for r in range(world))

            def loss(model, r, i=iteration, n=total):
                return summed_loss(model, samples(r, i)) * world / n

            expected = mean_gradients(ours.module, loss, world)
            ours.zero_grad()
            if rank == iteration:
                with pytest.raises(ValueError, match="no memory"), ours.weight(100):
                    raise ValueError("no memory")
            with ours.weight(len(samples(rank, iteration))):
                summed_loss(ours, samples(rank, iteration)).backward()
            assert_mean(ours, expected, 1e-5)

    run_ranks(body, 2)


def test_weighted_gradients_are_not_added_to_a_mean_that_was_left():
    def body(rank, world):
        ours = Ours(mlp())
        for iteration in range(4):
            keeps = iteration == 2 and rank == 1
            if not keeps:
                ours.zero_grad(set_to_none=iteration == 1)
            with ours.weight(3):
                if iteration == 2:
                    with pytest.raises(StepFailed, match=r"on rank 1: .* left in \.grad"):
                        summed_loss(ours, samples(rank, 0)).backward()
                else:
                    summed_loss(ours, samples(rank, 0)).backward()

    run_ranks(body, 2)


def test_a_weighted_micro_batch_whose_local_backward_raises_fails_the_iteration_everywhere():
    def body(rank, world):
        ours = Ours(mlp())
        if rank == 1:
            raising = ours.module[2].weight.register_hook(lambda grad: 1 / 0)
            with ours.no_sync(), ours.weight(3), pytest.raises(ZeroDivisionError):
                summed_loss(ours, samples(rank, 0)).backward()
            raising.remove()
        for fails in (True, False):
            with ours.weight(3):
                loss = summed_loss(ours, samples(rank, 1))
                with pytest.raises(StepFailed, match=r"rank 1: .* no_sync") if fails else nullcontext():
                    loss.backward()
            ours.zero_grad()

    run_ranks(body, 2)


# ---- sparse


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Embedding(10, 3, sparse=True)
        self.unused = nn.Embedding(10, 3, sparse=True)
        self.bags = nn.EmbeddingBag(8, 3, mode="sum", sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, ids, bags=True):
        x = self.used(ids)
        if bags:
            x = x + self.bags(ids % 8, torch.arange(len(ids)))
        return self.out(x).square().sum()


def rows(rank, iteration):
    return torch.tensor([rank, rank + iteration, 5, 5])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sparse_gradients_are_the_sparse_mean(world, transport):
    def body(rank, world):
        ours = Ours(Tables(), find_unused_parameters=True, transport=transport)
        for iteration in range(3):
            bags = iteration == 1 or rank == 0  # used on every rank, then on one
            expected = mean_gradients(ours.module, lambda m, r, i=iteration: m(rows(r, i), i == 1 or r == 0), world)
            ours.zero_grad()
            ours(rows(rank, iteration), bags).backward()
            for name, param in ours.module.named_parameters():
                if name == "unused.weight":
                    assert param.grad is None
                    continue
                assert param.grad.is_sparse == (not name.startswith("out")), name
                torch.testing.assert_close(dense(param.grad), expected[name])

    run_ranks(body, world)


def test_sparse_gradients_accumulated_under_no_sync_are_reduced_also_if_none_comes_at_last():
    def body(rank, world):
        ours = Ours(Tables(), find_unused_parameters=True)

        def first(m, r):
            return m(rows(r, 0), True)

        expected = mean_gradients(ours.module, lambda m, r: first(m, r) + m(rows(r, 1), False), world)
        with ours.no_sync():
            first(ours, rank).backward()
        ours(rows(rank, 1), False).backward()
        for name, want in expected.items():
            torch.testing.assert_close(dense(ours.module.get_parameter(name).grad), want, msg=name)

    run_ranks(body, 2)


def test_a_sparse_mean_kept_from_before_counts_on_a_rank_without_a_gradient_now():
    def body(rank, world):
        ours = Ours(Tables(), find_unused_parameters=True)

        def loss(model, r, iteration):
            return model(rows(r, iteration), bags=iteration == 0 or r == 0)

        expected = mean_gradients(ours.module, lambda m, r: loss(m, r, 0) + loss(m, r, 1), world)
        for iteration in range(2):
            loss(ours, rank, iteration).backward()
        for name, param in ours.module.named_parameters():
            if name in expected:
                torch.testing.assert_close(dense(param.grad), expected[name], msg=name)

    run_ranks(body, 2)


def test_gradients_that_are_sparse_in_some_iterations_and_dense_in_others_are_right():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(10, 3))

        def forward(self, ids, both):
            x = nn.functional.embedding(ids, self.weight, sparse=True)
            return (nn.functional.linear(x, self.weight) if both else x).square().sum()

    def body(rank, world):
        ours = Ours(Tied())
        for iteration, dense_on in enumerate([(0, 1), (), (0,), (0, 1), (1,), ()]):

            def loss(model, r, i=iteration, on=dense_on):
                return model(rows(r, i), r in on)

            expected = mean_gradients(ours.module, loss, world)
            ours.zero_grad()
            loss(ours, rank).backward()
            torch.testing.assert_close(dense(ours.module.weight.grad), expected["weight"])

    run_ranks(body, 2)


def test_training_sparse_tables_is_that_of_stock():
    def body(rank, world):
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        dist.broadcast(model[1].weight.data, 0)
        models = [kind(copy.deepcopy(model)) for kind in (Stock, Ours)]
        for iteration in range(4):
            for ddp in models:
                ddp.zero_grad()
                ddp(rows(rank, iteration)).square().sum().backward()
                torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        for a, b in zip(*[ddp.parameters() for ddp in models], strict=True):
            torch.testing.assert_close(a, b)

    run_ranks(body, 2)


def test_a_table_with_a_dense_gradient_besides_gets_a_dense_one():
    def body(rank, world):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.table = nn.Embedding(6, 3, sparse=True)

            def forward(self, ids):
                return (self.table(ids) @ self.table.weight.T).square().sum()

        ours = Ours(Tied())
        for _ in range(3):
            expected = mean_gradients(ours.module, lambda m, r: m(rows(r, 0)), world)
            ours.zero_grad()
            ours(rows(rank, 0)).backward()
            assert_mean(ours, expected)
        assert ours._reduction.plan.parameters == [0]  # learnt: it has a slot now

    run_ranks(body, 2)


# ---- join


def uneven(rank):
    """Rank r has 2 + 2 r batches."""
    return [batch(rank, i, 3, 24) for i in range(2 + 2 * rank)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_inputs_train_as_with_stock(world, initial, transport):
    def body(rank, world):
        models = [Stock(mlp(), bucket_cap_mb=0.001), Ours(mlp(), bucket_cap_mb=0.001, transport=transport)]
        for ddp in models:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            with ddp.join(divide_by_initial_world_size=initial):
                for x in uneven(rank):
                    optimizer.zero_grad()
                    ddp(x).square().mean().backward()
                    optimizer.step()
            same_on_all_ranks(ddp.parameters())
        for a, b in zip(*[ddp.parameters() for ddp in models], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        # and on, with as many for everybody
        expected = mean_gradients(models[1].module, lambda m, r: m(batch(r, 9, 3, 24)).square().mean(), world)
        models[1].zero_grad()
        models[1](batch(rank, 9, 3, 24)).square().mean().backward()
        assert_mean(models[1], expected)

    run_ranks(body, world)


def test_join_with_buffers_accumulation_and_unused_parameters():
    def body(rank, world):
        conv, heads = Ours(ConvNet()), Ours(TwoHeads(), find_unused_parameters=True)
        with Join([conv, heads]):
            for i in range(1 + 3 * rank):
                conv(batch(rank, i, 4, 36)).sum().backward()
                with heads.no_sync() if i % 2 == 0 else nullcontext():
                    heads(batch(rank, i, 4, 6), i % 2).sum().backward()
        same_on_all_ranks([*conv.parameters(), *conv.module.buffers(), *heads.parameters()])
        assert conv.module.norm.num_batches_tracked == 4

    run_ranks(body, 2)


def test_join_reaches_communication_hooks():
    def body(rank, world):
        models = [Stock(mlp()), Ours(mlp())]
        for ddp in models:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            with ddp.join():
                for x in uneven(rank):
                    optimizer.zero_grad()
                    ddp(x).square().mean().backward()
                    optimizer.step()
        for a, b in zip(*[ddp.parameters() for ddp in models], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    run_ranks(body, 2)


def test_join_with_weights_is_exact():
    def body(rank, world):
        ours = Ours(mlp())
        reference = mlp().double()
        batches = {r: [samples(r, m) for m in range(1 + 2 * r)] for r in range(world)}
        for iteration in range(3):
            parts = [xs[iteration] for xs in batches.values() if iteration < len(xs)]
            count = sum(map(len, parts))
            (summed_loss(reference, torch.cat(parts).double()) / count).backward()
            with torch.no_grad():
                for p in reference.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
        with ours.join():
            for x in batches[rank]:
                with ours.weight(len(x)):
                    summed_loss(ours, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(ours.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)

    run_ranks(body, 2)


def test_a_rank_that_had_joined_an_iteration_that_failed_trains_on():
    def body(rank, world):
        ours = Ours(mlp(), timeout=20)

        def train():
            with ours.join():
                for iteration in range(1 + rank):
                    loss = summed_loss(ours, samples(rank, iteration))
                    if iteration == 1:
                        raising = ours.module[2].weight.register_hook(lambda grad: 1 / 0)
                    try:
                        loss.backward()
                    finally:
                        if iteration == 1:
                            raising.remove()

        with pytest.raises((StepFailed, ZeroDivisionError)):
            train()
        ours.zero_grad()
        expected = mean_gradients(ours.module, lambda m, r: summed_loss(m, samples(r, 5)), world)
        summed_loss(ours.module, samples(rank, 5)).backward()
        assert_mean(ours, expected, 1e-5)

    run_ranks(body, 2)


def test_join_can_raise_on_all_when_the_first_runs_out():
    def body(rank, world):
        ours = Ours(mlp())

        def train():
            with ours.join(throw_on_early_termination=True):
                for x in uneven(rank):
                    ours(x).sum().backward()

        with pytest.raises(RuntimeError, match=r"exhausted|early"):
            train()

    run_ranks(body, 2)
