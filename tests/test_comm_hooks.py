"""Communication hooks: torch's own and the program's, over our buckets."""

import copy

import pytest
import torch
import torch.distributed as dist
from expect import raises
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.utils.checkpoint import checkpoint
from toys import ConvNet, TwoHeads, batch, mlp

from gpucomm import CommError, StepFailed
from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel
TRANSPORTS = ["shm", "c10d"]
TINY_BUCKETS = 0.0002


def loss_of(model, rank, iteration=0):
    return model(batch(rank, iteration, 5, 24)).square().mean()


def mean_hook(state, bucket):
    tensor = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


def two_stage_hook(state, bucket):
    """Sums, then from the callback sums again what one rank holds, divided: the mean by two collectives."""
    out = torch.futures.Future()

    def second(done):
        part = done.value()[0] / dist.get_world_size() ** 2
        dist.all_reduce(part, async_op=True).get_future().then(lambda last: out.set_result(last.value()[0]))

    dist.all_reduce(bucket.buffer().clone(), async_op=True).get_future().then(second)
    return out


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "hook",
    [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, mean_hook],
    ids=lambda hook: hook.__name__,
)
@pytest.mark.parametrize("cap", [TINY_BUCKETS, None], ids=["many buckets", "default"])
def test_a_hook_that_averages_gives_the_mean(hook, transport, cap):
    tolerance = {"fp16_compress_hook": 1e-3, "bf16_compress_hook": 1e-2}.get(hook.__name__, 1e-6)

    def body(rank, world):
        ours = Ours(mlp(), transport=transport, bucket_cap_mb=cap)
        ours.register_comm_hook(None, hook)
        for iteration in range(4):
            expected = mean_gradients(ours.module, lambda m, r, i=iteration: loss_of(m, r, i), world)
            ours.zero_grad()
            loss_of(ours, rank, iteration).backward()
            assert_mean(ours, expected, tolerance)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hook_that_communicates_from_callbacks_keeps_its_collectives_apart(transport):
    def body(rank, world):
        ours = Ours(mlp(depth=5), transport=transport, bucket_cap_mb=TINY_BUCKETS)
        ours.register_comm_hook(None, two_stage_hook)
        for iteration in range(5):
            expected = mean_gradients(ours.module, lambda m, r, i=iteration: loss_of(m, r, i), world)
            ours.zero_grad()
            loss_of(ours, rank, iteration).backward()
            assert_mean(ours, expected)

    run_ranks(body, 3)


@pytest.mark.parametrize("make", ["powerSGD", "post_localSGD", "wrapped"])
def test_training_with_a_hook_of_torch_is_that_of_stock(make):
    def hook_of():
        if make == "powerSGD":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            return state, powerSGD_hook.powerSGD_hook
        if make == "post_localSGD":
            state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=3)
            return state, post_localSGD_hook.post_localSGD_hook
        return None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)

    def body(rank, world):
        models = [kind(mlp()) for kind in (Stock, Ours)]
        steps = []
        for model in models:
            model.register_comm_hook(*hook_of())
            steps.append(torch.optim.SGD(model.parameters(), lr=0.05))
        for iteration in range(6):
            for model, optimizer in zip(models, steps, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, iteration).backward()
                optimizer.step()
        for a, b in zip(*[model.parameters() for model in models], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)

    run_ranks(body, 2)


def test_hooks_see_undivided_gradients_without_gaps_in_order():
    def body(rank, world):
        seen = []

        def hook(state, bucket):
            assert state == "state"
            grads = bucket.gradients()
            assert bucket.buffer().numel() == sum(g.numel() for g in grads)
            assert [g.shape for g in grads] == [p.shape for p in bucket.parameters()]
            flat = torch.cat([g.reshape(-1) for g in grads])
            assert torch.equal(flat, bucket.buffer())
            seen.append((bucket.index(), bucket.is_last(), flat.clone()))
            return done(bucket.buffer())

        ours = Ours(mlp(), bucket_cap_mb=TINY_BUCKETS)
        ours.register_comm_hook("state", hook)
        for _ in range(3):
            seen.clear()
            ours.zero_grad()
            loss_of(ours, rank).backward()
            assert [index for index, _, _ in seen] == list(range(len(ours._reduction.plan.buckets)))
            assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
            own = copy.deepcopy(ours.module)
            own.zero_grad()
            loss_of(own, rank).backward()
            total = sum(p.grad.double().sum() for p in own.parameters())
            torch.testing.assert_close(sum(flat.double().sum() for _, _, flat in seen), total)

    run_ranks(body, 2)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_from_the_second_iteration_on_hooks_are_called_while_backward_runs():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=TINY_BUCKETS)  # ready order is that of registration, so the plan stays
        before = []
        ours.module[0].weight.register_post_accumulate_grad_hook(lambda param: before.append(len(called)))

        def hook(state, bucket):
            called.append(bucket.index())
            return debugging_hooks.noop_hook(state, bucket)

        ours.register_comm_hook(None, hook)
        for _ in range(3):
            called = []
            loss_of(ours, rank).backward()
        assert before[0] == 0
        assert before[1] > 0
        assert before[2] > 0

    run_ranks(body, 2)


def test_a_bucket_of_complex_parameters_is_complex_to_its_hook():
    def body(rank, world):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.z = nn.Parameter(torch.randn(5, dtype=torch.complex64))
                self.x = nn.Parameter(torch.randn(3))

        dtypes = []

        def hook(state, bucket):
            dtypes.append(bucket.buffer().dtype)
            return mean_hook(state, bucket)

        ours = Ours(Net())
        ours.register_comm_hook(None, hook)
        net = ours.module
        ((net.z * (rank + 1)).abs().square().sum() + (net.x * rank).sum()).backward()
        assert sorted(map(str, dtypes)) == ["torch.complex64", "torch.float32"]
        torch.testing.assert_close(net.z.grad, 2 * net.z.detach() * 2.5)
        torch.testing.assert_close(net.x.grad, torch.full((3,), 0.5))

    run_ranks(body, 2)


def test_a_further_hook_gets_what_the_one_before_made():
    def body(rank, world):
        def double(state, bucket):
            return done(bucket.buffer() * 2)

        ours = Ours(mlp(), bucket_cap_mb=TINY_BUCKETS)
        ours.register_comm_hook(None, mean_hook)
        ours.register_comm_hook(None, double)
        for _ in range(3):
            expected = mean_gradients(ours.module, loss_of, world)
            ours.zero_grad()
            loss_of(ours, rank).backward()
            assert_mean(ours, {name: 2 * grad for name, grad in expected.items()})

    run_ranks(body, 2)


def test_the_noop_hook_leaves_gradients_local():
    def body(rank, world):
        ours = Ours(mlp())
        ours.register_comm_hook(None, debugging_hooks.noop_hook)
        own = copy.deepcopy(ours.module)
        loss_of(ours, rank).backward()
        loss_of(own, rank).backward()
        for a, b in zip(ours.parameters(), own.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    run_ranks(body, 2)


@pytest.mark.parametrize("kind", [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS])
def test_builtin_hooks_average(kind):
    def body(rank, world):
        ours = Ours(mlp())
        ours._register_builtin_comm_hook(kind)
        expected = mean_gradients(ours.module, loss_of, world)
        loss_of(ours, rank).backward()
        assert_mean(ours, expected, 1e-3)

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_accumulation_and_unused_parameters_reach_hooks(transport):
    def body(rank, world):
        ours = Ours(TwoHeads(), find_unused_parameters=True, transport=transport)
        ours.register_comm_hook(None, mean_hook)
        for iteration in range(3):
            head = iteration % 2

            def loss(m, r, h=head):
                return m(batch(r, 0, 4, 6), 0).sum() + m(batch(r, 1, 4, 6), h).square().sum()

            expected = mean_gradients(ours.module, loss, world)
            ours.zero_grad()
            with ours.no_sync():
                ours(batch(rank, 0, 4, 6), 0).sum().backward()
            ours(batch(rank, 1, 4, 6), head).square().sum().backward()
            assert_mean(ours, expected)
            assert (ours.module.heads[1].weight.grad is None) == (head == 0)

    run_ranks(body, 2)


class Reused(nn.Module):
    """One layer under reentrant checkpointing twice: it gets two gradients in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(24, 24)
        self.other = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])

    def forward(self, x, twice=True):
        x = self.other[0](x)
        for _ in range(2 if twice else 1):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)
        return self.other[2](self.other[1](x))


def test_a_layer_reused_under_reentrant_checkpointing_reaches_its_hook_whole():
    def body(rank, world):
        ours = Ours(Reused(), bucket_cap_mb=TINY_BUCKETS)
        ours.register_comm_hook(None, mean_hook)
        for iteration in range(3):
            expected = mean_gradients(ours.module, lambda m, r, i=iteration: loss_of(m, r, i), world)
            ours.zero_grad()
            loss_of(ours, rank, iteration).backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_second_gradient_after_the_hook_was_called_fails_everywhere_once():
    def body(rank, world):
        ours = Ours(Reused(), bucket_cap_mb=TINY_BUCKETS)
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
        for iteration in range(3):
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24), twice=False).square().mean().backward()
        with pytest.raises(StepFailed, match=r"'layer\.(weight|bias)' got a second gradient"):
            loss_of(ours, rank, 3).backward()
        ours.zero_grad()
        expected = mean_gradients(ours.module, lambda m, r: loss_of(m, r, 4), world)
        loss_of(ours, rank, 4).backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_hook_that_raises_before_it_communicates_fails_the_iteration_on_all_ranks_over_shared_memory():
    def body(rank, world):
        calls = []

        def hook(state, bucket):
            calls.append(bucket.index())
            if len(calls) == 4:
                raise ValueError("no luck")
            return done(bucket.buffer())  # the ranks' collectives stay even

        ours = Ours(mlp(), bucket_cap_mb=TINY_BUCKETS, transport="shm")
        ours.register_comm_hook(None, hook if rank == 1 else debugging_hooks.noop_hook)
        with pytest.raises((StepFailed, ValueError), match="no luck"):
            loss_of(ours, rank).backward()
        calls = [0] * 10
        ours.zero_grad()
        loss_of(ours, rank).backward()
        assert all(p.grad is not None for p in ours.parameters())

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hook_that_leaves_peers_in_a_collective_is_named_at_once_and_ends_the_wrapper(transport):
    def body(rank, world):
        def hook(state, bucket):
            if rank == 1 and bucket.index() == 1:
                raise ValueError("no luck")
            return mean_hook(state, bucket)

        ours = Ours(mlp(), bucket_cap_mb=TINY_BUCKETS, transport=transport)
        ours.register_comm_hook(None, hook)
        with pytest.raises((CommError, ValueError), match="no luck"):
            loss_of(ours, rank).backward()
        with pytest.raises(CommError, match="dead"):
            loss_of(ours, rank)

    run_ranks(body, 2, timeout_s=30)


@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        (3, TypeError, "callable"),
        (lambda state: None, ValueError, r"hook\(state, bucket\)"),
        (lambda state, bucket: 3, StepFailed, "returned <class 'int'>"),
        (lambda state, bucket: done(3), TypeError, "holds <class 'int'>"),
        (lambda state, bucket: done(torch.ones(3)), ValueError, "3 elements"),
    ],
)
def test_what_is_no_hook_is_refused(hook, error, text):
    def body(rank, world):
        ours = Ours(nn.Linear(4, 1))

        def use():
            ours.register_comm_hook(None, hook)
            ours(torch.ones(1, 4)).sum().backward()

        raises(error, text, use)

    run_ranks(body, 1)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_fused_optimizer_steps_each_bucket_when_it_is_reduced():
    def body(rank, world):
        plain, fused = Ours(mlp()), Ours(mlp())
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        fused._register_fused_optim(torch.optim.SGD, lr=0.1)
        for iteration in range(4):
            optimizer.zero_grad()
            fused.zero_grad()
            loss_of(plain, rank, iteration).backward()
            optimizer.step()
            loss_of(fused, rank, iteration).backward()
            for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
                torch.testing.assert_close(a, b)

    run_ranks(body, 2)


def test_buffers_of_batch_norm_go_on_beside_a_hook():
    def body(rank, world):
        ours = Ours(ConvNet())
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
        for iteration in range(3):
            ours.zero_grad()
            ours(batch(rank, iteration, 4, 36)).sum().backward()
        ours.sync_buffers()
        same_on_all_ranks(ours.module.buffers())

    run_ranks(body, 2)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_optimizers_applied_in_backward_train_as_those_applied_after_it(transport, views):
    def body(rank, world):
        from torch.distributed.optim import _apply_optimizer_in_backward

        plain = Ours(mlp(), transport=transport)
        inside = mlp()
        _apply_optimizer_in_backward(torch.optim.SGD, inside.parameters(), {"lr": 0.1})
        inside = Ours(inside, transport=transport, gradient_as_bucket_view=views, bucket_cap_mb=TINY_BUCKETS)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for iteration in range(4):
            optimizer.zero_grad()
            loss_of(plain, rank, iteration).backward()
            optimizer.step()
            loss_of(inside, rank, iteration).backward()
            for a, b in zip(plain.parameters(), inside.parameters(), strict=True):
                torch.testing.assert_close(a, b)
                assert b.grad is None

    run_ranks(body, 2)
