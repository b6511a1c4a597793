"""mixed_precision=: torch's _MixedPrecision on the CPU: narrow forward and backward, wide parameters beside it."""

import copy
import pickle

import pytest
import torch
from gradients import same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint
from toys import ConvNet, Recurrent, TiedEmbedding, TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm.errors import StepFailed

BF16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
TRANSPORTS = ["shm", "c10d"]


def narrow_mean(model, losses, reduce_dtype=torch.bfloat16, dtype=torch.bfloat16):
    """The reference: each rank's gradients from a narrow copy, cast to what they travel in, averaged in fp64."""
    total = {}
    for loss in losses:
        replica = copy.deepcopy(model).to(dtype)
        loss(replica).backward()
        for name, param in replica.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + param.grad.to(reduce_dtype).double() / len(losses)
    return total


def dtypes(tensors):
    return {t.dtype for t in tensors}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("build", [mlp, TiedEmbedding, Recurrent])
def test_gradients_are_those_of_a_narrow_copy_averaged_and_made_wide(build, transport):
    def body(rank, world):
        model = build()
        shape = (5, 24) if build is mlp else (4, 12)
        ours = Ours(copy.deepcopy(model), mixed_precision=BF16, transport=transport)
        for iteration in range(3):
            ours.zero_grad()
            ours(batch(rank, iteration, *shape)).float().square().mean().backward()
            losses = [
                lambda m, r=r, i=iteration: m(batch(r, i, *shape).bfloat16()).float().square().mean()
                for r in range(world)
            ]
            expected = narrow_mean(model, losses)
            for name, param in ours.module.named_parameters():
                assert param.grad.dtype == torch.float32, name
                # The mean is rounded once, to what it travels in.
                torch.testing.assert_close(param.grad.double(), expected[name], rtol=2**-8, atol=1e-7, msg=name)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_wider_reduce_dtype_adds_without_rounding():
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), mixed_precision=config)
        for iteration in range(3):
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24)).float().square().mean().backward()
            losses = [
                lambda m, r=r, i=iteration: m(batch(r, i, 5, 24).bfloat16()).float().square().mean()
                for r in range(world)
            ]
            expected = narrow_mean(model, losses, reduce_dtype=torch.float32)
            for name, param in ours.module.named_parameters():
                torch.testing.assert_close(param.grad.double(), expected[name], rtol=1e-6, atol=1e-9, msg=name)
        return {bucket.dtype for bucket in ours._reduction.plan.buckets}

    assert run_ranks(body, 2) == [{"float32"}] * 2


def test_a_reduce_dtype_alone_leaves_the_computation_wide():
    config = _MixedPrecision(reduce_dtype=torch.float16)

    def body(rank, world):
        ours = Ours(mlp(), mixed_precision=config)
        seen = []
        ours.module[0].register_forward_hook(lambda m, inputs, output: seen.append((m.weight.dtype, output.dtype)))
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        return seen, dtypes(p.grad for p in ours.parameters()), {b.dtype for b in ours._reduction.plan.buckets}

    wide = (torch.float32, torch.float32)
    assert run_ranks(body, 2) == [([wide], {torch.float32}, {"float16"})] * 2


def test_a_param_dtype_alone_is_what_gradients_travel_in():
    def body(rank, world):
        ours = Ours(mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.float16))
        return {bucket.dtype for bucket in ours._reduction.plan.buckets}

    assert run_ranks(body, 1) == [{"float16"}]


def test_what_a_forward_sees_and_what_is_left_after_backward():
    class Looker(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.register_buffer("offset", torch.ones(3))
            self.register_buffer("count", torch.tensor(7))

        def forward(self, x, extra):
            self.seen = [x.dtype, extra["y"][0].dtype, extra["k"].dtype, self.inner.weight.dtype, self.frozen.dtype]
            self.seen += [p.data.dtype for p in self.inner.parameters()]
            self.seen += [self.offset.dtype, self.count.dtype]
            return self.inner(x + extra["y"][0]) * self.frozen + self.offset

    def body(rank, world):
        module = Looker()
        ours = Ours(module, mixed_precision=BF16)
        before = dtypes(ours.parameters())
        x = torch.randn(2, 3)
        output = ours(x, {"y": [torch.randn(2, 3)], "k": torch.tensor([1, 2])})
        between = dtypes(ours.parameters())
        output.sum().backward()
        after = dtypes(ours.parameters())
        return module.seen, output.dtype, before, between, after

    narrow, wide = torch.bfloat16, torch.float32
    for seen, output, before, between, after in run_ranks(body, 2):
        assert seen == [narrow, narrow, torch.int64, narrow, narrow, narrow, narrow, narrow, torch.int64]
        assert output == narrow
        assert (before, between, after) == ({wide}, {narrow}, {wide})


def test_masters_keep_what_narrow_parameters_would_lose():
    """Updates smaller than half a bfloat16 step add up."""

    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), mixed_precision=BF16)
        with torch.no_grad():
            ours.module.weight.fill_(1.0)
        optimizer = torch.optim.SGD(ours.parameters(), lr=2.0**-10)
        for _ in range(8):
            optimizer.zero_grad()
            ours(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return ours.module.weight.item()

    assert run_ranks(body, 2) == [1.0 - 8 * 2.0**-10] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_under_no_sync_is_wide(set_to_none):
    def micro_loss(model, rank, number):
        return model(batch(rank, number, 5, 24).bfloat16()).float().mean()

    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), mixed_precision=BF16)
        for iteration in range(3):
            ours.zero_grad(set_to_none=set_to_none)
            means = [
                narrow_mean(model, [lambda m, r=r, n=10 * iteration + k: micro_loss(m, r, n) for r in range(world)])
                for k in range(3)
            ]
            parts = {name: sum(mean[name] for mean in means) for name in means[0]}
            with ours.no_sync():
                for k in range(2):
                    ours(batch(rank, 10 * iteration + k, 5, 24)).float().mean().backward()
                    assert dtypes(p.grad for p in ours.parameters()) == {torch.float32}
            ours(batch(rank, 10 * iteration + 2, 5, 24)).float().mean().backward()
            for name, param in ours.module.named_parameters():
                bound = 2**-7 * parts[name].abs() + 2**-8 * parts[name].abs().max()
                assert ((param.grad.double() - parts[name]).abs() <= bound).all(), name

    run_ranks(body, 2)


def test_parameters_and_buffers_to_ignore_stay_as_they_are():
    def body(rank, world):
        module = ConvNet()
        ignored = ["head.weight", "norm.running_mean"]
        Ours._set_params_and_buffers_to_ignore_for_model(module, ignored)
        ours = Ours(module, mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float64))
        seen = {}
        module.norm.register_forward_pre_hook(
            lambda *_: seen.update({n: t.dtype for n, t in [*module.named_parameters(), *module.named_buffers()]})
        )
        with pytest.raises(RuntimeError):  # torch's operators do not mix what is asked for here
            ours(torch.randn(4, 36)).float().sum().backward()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            assert hasattr(tensor, "_mp_param") == (name not in ignored and isinstance(tensor, nn.Parameter)), name
        return seen

    for seen in run_ranks(body, 2):
        assert seen["head.weight"] == torch.float32
        assert seen["norm.running_mean"] == torch.float32
        assert seen["norm.running_var"] == torch.float64
        assert seen["norm.num_batches_tracked"] == torch.int64
        assert seen["conv.weight"] == torch.bfloat16


def test_where_programs_look_for_masters_and_copies():
    def body(rank, world):
        ours = Ours(nn.Linear(3, 3), mixed_precision=BF16)
        weight = ours.module.weight

        def look():
            return weight._mp_param.dtype, weight._fp_param.dtype, weight._fp_param.shape

        found = [look()]
        output = ours(torch.randn(2, 3))
        found.append(look())
        assert torch.equal(weight._mp_param, weight)
        output.sum().backward()
        assert weight._fp_param.data_ptr() == weight.data_ptr()
        return [*found, look()]

    assert run_ranks(body, 1) == [[(torch.bfloat16, torch.float32, (3, 3))] * 3]


# ---- what a program may do between forward and backward, or without a backward


def test_state_dict_is_wide_before_between_and_after():
    def body(rank, world):
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        ours = Ours(module, mixed_precision=BF16)
        expected = {name: value.clone() for name, value in ours.state_dict().items()}
        output = ours(torch.randn(4, 3).bfloat16())
        for name, value in ours.state_dict().items():
            assert value.dtype == expected[name].dtype, name
            if "running" not in name and "batches" not in name:
                assert torch.equal(value, expected[name]), name
        assert dtypes(module.state_dict().values()) == {torch.float32, torch.int64}
        output.float().sum().backward()
        assert dtypes(ours.state_dict().values()) == {torch.float32, torch.int64}

    run_ranks(body, 2)


def test_what_is_loaded_after_a_forward_is_kept():
    def body(rank, world):
        ours = Ours(nn.Linear(3, 3), mixed_precision=BF16)
        state = {name: torch.full_like(value, 1 + 2.0**-12) for name, value in ours.state_dict().items()}
        ours(torch.randn(2, 3))
        ours.load_state_dict(state)
        for _ in range(2):
            ours(torch.randn(2, 3)).sum().backward()
        return ours.module.weight[0, 0].item()

    assert run_ranks(body, 2) == [1 + 2.0**-12] * 2


def test_what_is_written_after_a_forward_is_kept():
    def body(rank, world):
        ours = Ours(nn.Linear(3, 3), mixed_precision=BF16)
        ours(torch.randn(2, 3))
        with torch.no_grad():
            ours.module.weight.fill_(2.0)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer.step()
        return ours.module.weight.dtype, ours.module.weight[0, 0].item()

    assert run_ranks(body, 1) == [(torch.float32, 2.0)]


def test_an_evaluation_leaves_wide_parameters():
    def body(rank, world):
        ours = Ours(nn.Linear(3, 3), mixed_precision=BF16)
        with torch.no_grad():
            output = ours(torch.randn(2, 3))
        return output.dtype, dtypes(ours.parameters())

    assert run_ranks(body, 2) == [(torch.bfloat16, {torch.float32})] * 2


def test_an_evaluation_between_forward_and_backward_disturbs_neither():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), mixed_precision=BF16)
        output = ours(batch(rank, 0, 5, 24))
        with torch.no_grad():
            ours(batch(rank, 1, 5, 24))
        output.float().square().mean().backward()
        losses = [lambda m, r=r: m(batch(r, 0, 5, 24).bfloat16()).float().square().mean() for r in range(world)]
        expected = narrow_mean(model, losses)
        for name, param in ours.module.named_parameters():
            torch.testing.assert_close(param.grad.double(), expected[name], rtol=2**-8, atol=1e-7, msg=name)

    run_ranks(body, 2)


def test_an_optimizer_steps_masters_after_local_backwards_alone():
    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), mixed_precision=BF16)
        with torch.no_grad():
            ours.module.weight.fill_(1.0)
        optimizer = torch.optim.SGD(ours.parameters(), lr=2.0**-10)
        with ours.no_sync():
            for _ in range(8):
                optimizer.zero_grad()
                ours(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        return ours.module.weight.item()

    assert run_ranks(body, 2) == [1.0 - 8 * 2.0**-10] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_are_computed_again_with_the_narrow_copies(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda x, w=layer: torch.tanh(w(x)), x, use_reentrant=use_reentrant)
            return x

    def body(rank, world):
        model = Checkpointed()
        ours = Ours(copy.deepcopy(model), mixed_precision=BF16)
        for iteration in range(2):
            ours.zero_grad()
            ours(batch(rank, iteration, 4, 8).requires_grad_()).float().square().mean().backward()
            losses = [
                lambda m, r=r, i=iteration: m(batch(r, i, 4, 8).bfloat16().requires_grad_()).float().square().mean()
                for r in range(world)
            ]
            expected = narrow_mean(model, losses)
            for name, param in ours.module.named_parameters():
                torch.testing.assert_close(param.grad.double(), expected[name], rtol=2**-8, atol=1e-7, msg=name)

    run_ranks(body, 2)


def test_unused_parameters():
    def body(rank, world):
        model = TwoHeads()
        ours = Ours(copy.deepcopy(model), mixed_precision=BF16, find_unused_parameters=True)
        for iteration, heads in enumerate([(0, 1), (0, 0), (1, None)]):
            ours.zero_grad()
            ours(batch(rank, iteration, 3, 6), heads[rank]).float().square().mean().backward()
            losses = [
                lambda m, r=r, i=iteration, h=heads: m(batch(r, i, 3, 6).bfloat16(), h[r]).float().square().mean()
                for r in range(world)
            ]
            expected = narrow_mean(model, losses)
            for name, param in ours.module.named_parameters():
                assert param.dtype == torch.float32
                if name not in expected:
                    assert param.grad is None, name
                else:
                    torch.testing.assert_close(param.grad.double(), expected[name], rtol=2**-8, atol=1e-7, msg=name)

    run_ranks(body, 2)


def test_after_a_backward_that_raised_the_next_iteration_is_right():
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, armed):
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.armed:
                raise ValueError("trap")
            return grad, None

    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), mixed_precision=BF16)
        ours.module[0].register_forward_hook(lambda m, inputs, output: Trap.apply(output, armed and rank == 1))
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
        for iteration in range(3):
            armed = iteration == 1
            ours.zero_grad()
            loss = ours(batch(rank, iteration, 5, 24)).float().square().mean()
            if armed:
                with pytest.raises(ValueError if rank == 1 else StepFailed, match="trap"):
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            losses = [
                lambda m, r=r, i=iteration: m(batch(r, i, 5, 24).bfloat16()).float().square().mean()
                for r in range(world)
            ]
            expected = narrow_mean(model, losses)
            for name, param in ours.module.named_parameters():
                assert param.dtype == torch.float32
                torch.testing.assert_close(param.grad.double(), expected[name], rtol=2**-8, atol=1e-7, msg=name)

    run_ranks(body, 2)


def test_a_gradient_scaler_unscales_wide_gradients_and_skips_overflows():
    config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)

    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), mixed_precision=config)
        with torch.no_grad():
            ours.module.weight.fill_(1.0)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = ours(torch.ones(1, 1)).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append((ours.module.weight.item(), scaler.get_scale()))
        return found

    # 2^16 is beyond float16, on every rank.
    assert run_ranks(body, 2) == [[(1.0, 2.0**15), (0.5, 2.0**15), (0.0, 2.0**15), (-0.5, 2.0**15)]] * 2


def test_a_copy_and_an_unpickled_wrapper_go_on():
    def body(rank, world):
        ours = Ours(mlp(), mixed_precision=BF16)
        ours(batch(rank, 0, 5, 24)).float().square().mean().backward()
        expected = [p.grad.clone() for p in ours.parameters()]
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            other.zero_grad()
            other(batch(rank, 0, 5, 24)).float().square().mean().backward()
            assert dtypes(other.parameters()) == {torch.float32}
            assert all(torch.equal(p.grad, e) for p, e in zip(other.parameters(), expected, strict=True))

    run_ranks(body, 2)


# ---- the argument


def test_a_wire_dtype_beside_it_is_a_contradiction():
    (outcome,) = run_ranks(
        lambda rank, world: Ours(mlp(), mixed_precision=BF16, wire_dtype=torch.bfloat16), 1, expect_failures=True
    )
    assert outcome.error_type == "ValueError"
    assert "wire_dtype and mixed_precision contradict each other" in outcome.error_text


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("bf16", "TypeError", "mixed_precision is 'bf16' without param_dtype"),
        (_MixedPrecision(param_dtype=torch.int8), "ValueError", "mixed_precision.param_dtype is torch.int8"),
        (
            _MixedPrecision(reduce_dtype="bf16"),
            "ValueError",
            "mixed_precision.reduce_dtype is 'bf16', accepted",
        ),
    ],
)
def test_another_value_is_refused(value, kind, text):
    (outcome,) = run_ranks(lambda rank, world: Ours(mlp(), mixed_precision=value), 1, expect_failures=True)
    assert outcome.error_type == kind
    assert text in outcome.error_text


def test_a_communication_hook_is_refused_beside_it():
    def body(rank, world):
        ours = Ours(mlp(), mixed_precision=BF16)
        with pytest.raises(RuntimeError, match="a communication hook beside wire_dtype= or mixed_precision="):
            ours.register_comm_hook(None, lambda state, bucket: None)

    run_ranks(body, 1)
