"""Copies of the wrapper by pickle and deepcopy, and its move to another process group."""

import copy
import io
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from expect import raises
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from toys import ConvNet, TwoHeads, batch, mlp

from gpucomm import BucketPlan, CommError
from gpucomm import DistributedDataParallel as Ours

TRANSPORTS = ["shm", "c10d"]


def loss_of(model, rank, iteration=0):
    return model(batch(rank, iteration, 5, 24)).square().mean()


def by_pickle(ddp):
    return pickle.loads(pickle.dumps(ddp))


def by_torch_save(ddp):
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save], ids=lambda f: f.__name__)
def test_a_copy_is_a_working_wrapper_of_its_own(copied, transport):
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), transport=transport, bucket_cap_mb=0.0002)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for iteration in range(2):
            loss_of(ours, rank, iteration).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = [p.detach().clone() for p in ours.parameters()]
        other = copied(ours)
        assert type(other) is Ours
        assert other.transport == transport
        assert other.bucket_bytes_cap == ours.bucket_bytes_cap
        for p, q, value in zip(ours.parameters(), other.parameters(), values, strict=True):
            assert p is not q
            assert torch.equal(p, q)
            assert torch.equal(q, value)
        now = copy.deepcopy(ours.module)
        for iteration in range(3):
            for ddp in (other, ours):
                ddp.zero_grad()
                loss_of(ddp, rank, iteration).backward()
                assert_mean(ddp, mean_gradients(now, lambda m, r, i=iteration: loss_of(m, r, i), world))
        step = torch.optim.SGD(other.parameters(), lr=0.1)
        step.step()
        assert all(torch.equal(p, value) for p, value in zip(ours.parameters(), values, strict=True))
        same_on_all_ranks(other.parameters())

    run_ranks(body, 2)


def test_a_copy_keeps_each_ranks_buffers_and_the_settings():
    def body(rank, world):
        model = TwoHeads()
        model.register_buffer("seen", torch.tensor([float(rank)]))
        ours = Ours(model, static_graph=True, forward_sync_buffers=False, gradient_as_bucket_view=True)
        ours.module.seen.fill_(rank)
        other = copy.deepcopy(ours)
        assert other.module.seen.item() == rank
        settings = (
            "static_graph gradient_as_bucket_view forward_sync_buffers find_unused_parameters device device_type dim"
        )
        for name in settings.split():
            assert getattr(other, name) == getattr(ours, name), name
        assert other._get_ddp_logging_data()["static_graph"] == 1
        for iteration in range(3):
            other(batch(rank, iteration, 3, 6), 0).sum().backward()  # the unused head is no error

    run_ranks(body, 2)


def test_a_copy_taken_with_gradients_and_under_no_sync_does_not_share_them():
    def body(rank, world):
        ours = Ours(mlp())
        loss_of(ours, rank).backward()
        before = [p.grad.clone() for p in ours.parameters()]
        with ours.no_sync():
            other = copy.deepcopy(ours)
            assert other.require_backward_grad_sync is False
        other.require_backward_grad_sync = True
        other.zero_grad()
        loss_of(other, rank, 1).backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(ours.parameters(), before, strict=True))

    run_ranks(body, 2)


def test_a_copy_keeps_delayed_parameters_and_those_that_are_ignored():
    def body(rank, world):
        model = mlp()
        Ours._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
        delayed = [("0.weight", model[0].weight), ("0.bias", model[0].bias)]
        ours = Ours(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[0].weight)
        other = copy.deepcopy(ours)
        assert other._delay_all_reduce_params == list(other.module[0].parameters())
        assert other.parameters_to_ignore == ours.parameters_to_ignore == {"2.bias", "0.weight", "0.bias"}
        assert "2.bias" not in other._reduction.names
        loss_of(other, rank).backward()
        same_on_all_ranks(p.grad for name, p in other.module.named_parameters() if name != "2.bias")

    run_ranks(body, 2)


def test_a_given_plan_is_kept_by_a_copy():
    def body(rank, world):
        model = mlp()
        plan = BucketPlan.from_json(Ours(copy.deepcopy(model), bucket_cap_mb=0)._reduction.plan.to_json())
        other = by_pickle(Ours(model, plan=plan))
        loss_of(other, rank).backward()
        loss_of(other, rank, 1).backward()
        assert other._reduction.plan == plan

    run_ranks(body, 2)


def test_only_a_wrapper_over_the_default_group_can_be_copied():
    def body(rank, world):
        ours = Ours(mlp(), process_group=dist.new_group())
        for copied in (copy.deepcopy, pickle.dumps):
            raises(
                RuntimeError, "only supported when using DDP with the default process group", lambda c=copied: c(ours)
            )
        assert "default process group" in ours._get_ddp_logging_data()["error"]
        same = Ours(mlp(), process_group=dist.group.WORLD)
        loss_of(copy.deepcopy(same), rank).backward()

    run_ranks(body, 2)


def test_without_a_process_group_a_pickle_cannot_be_loaded_and_says_why():
    def body(rank, world):
        text = pickle.dumps(Ours(mlp()))
        dist.destroy_process_group()
        raises(RuntimeError, "Default process group has not been initialized", lambda: pickle.loads(text))

    run_ranks(body, 1)


def test_a_rank_that_cannot_load_its_copy_says_so_to_its_peers():
    def body(rank, world):
        ours = Ours(mlp(), timeout=20)
        state = ours.__getstate__()
        if rank == 1:
            state["_arguments"].transport = "smoke"
        other = Ours.__new__(Ours)
        kind = ValueError if rank == 1 else CommError
        raises(kind, "transport is 'smoke'", lambda: other.__setstate__(state))

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_goes_on_in_a_smaller_and_again_in_a_larger_group(transport):
    def body(rank, world):
        model = ConvNet()
        ours = Ours(copy.deepcopy(model), transport=transport)

        def loss(m, r, iteration):
            return m(batch(r, iteration, 5, 36)).square().mean()

        loss(ours, rank, 0).backward()
        kept = [p.grad.clone() for p in ours.parameters()]
        pair = dist.new_group([0, 1])
        ours._update_process_group(pair)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(ours.parameters(), kept, strict=True))
        if rank < 2:
            assert ours.process_group is pair
            assert not ours._has_rebuilt_buckets
            for iteration in range(1, 4):
                ours.zero_grad()
                now = copy.deepcopy(ours.module)
                loss(ours, rank, iteration).backward()
                assert_mean(ours, mean_gradients(now, lambda m, r, i=iteration: loss(m, r, i), 2))
            assert ours._get_ddp_logging_data()["world_size"] == 2
        dist.barrier()
        ours._update_process_group(dist.group.WORLD)
        ours.zero_grad()
        now = copy.deepcopy(ours.module)
        loss(ours, rank, 5).backward()
        assert_mean(ours, mean_gradients(now, lambda m, r: loss(m, r, 5), world))
        same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 3)


def test_after_a_peer_has_died_the_others_go_on_without_it():
    def body(rank, world):
        ours = Ours(mlp(), transport="shm", timeout=20)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        rest = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
        loss_of(ours, rank).backward()
        if rank == 2:
            os._exit(3)
        raises(CommError, "rank 2", lambda: [loss_of(ours, rank, iteration).backward() for iteration in range(1, 3)])
        ours._update_process_group(rest)
        for iteration in range(3):
            ours.zero_grad()
            expected = mean_gradients(copy.deepcopy(ours.module), lambda m, r, i=iteration: loss_of(m, r, i), 2)
            loss_of(ours, rank, iteration).backward()
            assert_mean(ours, expected)
            optimizer.step()
        return True

    outcomes = run_ranks(body, 3, expect_failures=True)
    assert [outcome.value for outcome in outcomes[:2]] == [True, True], outcomes[0].error_text


def test_a_communication_hook_goes_along():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        ours.register_comm_hook(None, allreduce_hook)
        for other in (copy.deepcopy(ours), by_pickle(ours)):
            loss_of(other, rank).backward()
            assert other._reduction.comm_hooks is not None
            assert other._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"
            assert_mean(other, mean_gradients(model, loss_of, world))
        ours._update_process_group(dist.new_group())
        loss_of(ours, rank).backward()
        assert ours._reduction.comm_hooks is not None
        assert_mean(ours, mean_gradients(model, loss_of, world))

    run_ranks(body, 2)
