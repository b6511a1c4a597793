"""wire_dtype: fp32 gradients travel in 16 bits, are added in fp32 and come back as fp32."""

import copy

import pytest
import torch
import torch.distributed as dist
from gradients import same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from toys import TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm.transport import C10dTransport

WIRES = [torch.bfloat16, torch.float16]
TRANSPORTS = ["shm", "c10d"]
# Half the distance of two neighbours, relative to the number: the rounding error.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Numbers of float16 below its normal ones are this far apart at most.
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-24}


def local_gradients(model, losses):
    """The fp32 gradients of each loss(model), by parameter name; None for parameters without one."""
    found = []
    for loss in losses:
        replica = copy.deepcopy(model)
        replica.zero_grad()
        loss(replica).backward()
        found.append({name: p.grad for name, p in replica.named_parameters()})
    return found


def assert_mean_within_rounding(ddp, contributions, wire):
    """.grad is the float64 mean up to one rounding of each contribution and one of the mean.

    A process group of more than two ranks rounds every sum on the way.
    """
    sums = len(contributions) - 1 if ddp.transport == "c10d" and len(contributions) > 2 else 0
    for name, param in ddp.module.named_parameters():
        parts = [part[name] for part in contributions if part[name] is not None]
        if not parts:
            assert param.grad is None, name
            continue
        assert param.grad.dtype == torch.float32, name
        mean = sum(part.double() for part in parts) / len(contributions)
        magnitude = sum(part.double().abs() for part in parts) / len(contributions)
        bound = UNIT[wire] * ((1 + sums) * magnitude + mean.abs()) * (1 + 4 * UNIT[wire]) + (2 + sums) * SMALLEST[wire]
        assert ((param.grad.double() - mean).abs() <= bound).all(), name


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_is_right_up_to_rounding_and_equal_on_all_ranks(world, wire, transport):
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), transport=transport, wire_dtype=wire)
        for iteration in range(3):  # also in the plan of the ready order
            losses = [lambda m, r=r, i=iteration: m(batch(r, i, 5, 24)).square().mean() for r in range(world)]
            ours.zero_grad()
            losses[rank](ours).backward()
            assert_mean_within_rounding(ours, local_gradients(model, losses), wire)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, world)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_are_accumulated_in_fp32_and_rounded_when_they_travel(transport):
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), transport=transport, wire_dtype=torch.bfloat16)

        def total(m, r, iteration):
            return sum(m(batch(r, 10 * iteration + k, 5, 24)).square().mean() for k in range(3))

        for iteration in range(3):
            ours.zero_grad(set_to_none=iteration != 2)
            with ours.no_sync():
                for k in range(2):
                    ours(batch(rank, 10 * iteration + k, 5, 24)).square().mean().backward()
            ours(batch(rank, 10 * iteration + 2, 5, 24)).square().mean().backward()
            losses = [lambda m, r=r, i=iteration: total(m, r, i) for r in range(world)]
            # Accumulation adds in another order than the reference: a few roundings of fp32 beside those of the wire.
            parts = local_gradients(model, losses)
            for part in parts:
                for grad in part.values():
                    grad.mul_(1 + 1e-6)
            assert_mean_within_rounding(ours, parts, torch.bfloat16)

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_accumulated_after_a_reduction_is_added_to_the_fp32_mean(transport):
    def body(rank, world):
        ours = Ours(nn.Linear(4, 2, bias=False), transport=transport, wire_dtype=torch.bfloat16)
        x = torch.full((1, 4), 1.0 + rank)
        ours(x).sum().backward()  # mean 1.5
        with ours.no_sync():
            ours(torch.full((1, 4), 2.0**-12)).sum().backward()  # lost if added in bfloat16
        return ours.module.weight.grad[0, 0].item()

    assert run_ranks(body, 2) == [1.5 + 2.0**-12] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_that_a_rank_or_all_do_not_use(transport):
    def body(rank, world):
        model = TwoHeads()
        ours = Ours(copy.deepcopy(model), transport=transport, wire_dtype=torch.bfloat16, find_unused_parameters=True)
        for iteration, heads in enumerate([(0, 1), (0, 0), (1, 0), (0, None)]):
            losses = [
                lambda m, r=r, i=iteration, h=heads: m(batch(r, i, 3, 6), h[r]).square().mean() for r in range(world)
            ]
            ours.zero_grad()
            losses[rank](ours).backward()
            assert_mean_within_rounding(ours, local_gradients(model, losses), torch.bfloat16)

    run_ranks(body, 2)


def test_a_kept_gradient_of_a_parameter_that_nobody_uses_stays_as_it_is():
    def body(rank, world):
        ours = Ours(TwoHeads(), wire_dtype=torch.bfloat16, find_unused_parameters=True)
        for _ in range(2):
            ours(batch(rank, 0, 3, 6), 0).sum().backward()
        grad = ours.module.heads[0].weight.grad
        before = grad.clone()
        ours(batch(rank, 1, 3, 6), 1).sum().backward()  # head 0 keeps its gradient, which lies in a bucket's memory
        assert torch.equal(ours.module.heads[0].weight.grad, before)
        assert torch.equal(grad, before)

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_gradient_of_the_same_backward_is_reduced_too(transport):
    def body(rank, world):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(6, 6)

            def forward(self, x):
                for _ in range(2):
                    x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
                return x

        model = Shared()
        ours = Ours(copy.deepcopy(model), transport=transport, wire_dtype=torch.bfloat16)
        losses = [lambda m, r=r: m(batch(r, 0, 3, 6).requires_grad_()).square().mean() for r in range(world)]
        losses[rank](ours).backward()
        parts = local_gradients(model, losses)
        for name, param in ours.module.named_parameters():
            mean = sum(part[name].double() for part in parts) / world
            # Two parts, each rounded by itself; the second one, of fp32, is not.
            torch.testing.assert_close(param.grad.double(), mean, rtol=0, atol=4 * UNIT[torch.bfloat16] * 1.0)
        same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_gradient_that_the_program_keeps_is_never_overwritten():
    def body(rank, world):
        ours = Ours(mlp(), wire_dtype=torch.float16)
        kept = []
        for iteration in range(4):
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            kept += [(p.grad, p.grad.clone()) for p in ours.parameters()]
            kept += [(p.grad[:1], p.grad[:1].clone()) for p in ours.parameters()]
        assert all(torch.equal(grad, copy) for grad, copy in kept)

    run_ranks(body, 2)


def test_other_dtypes_travel_as_they_are():
    def body(rank, world):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()])
        ours = Ours(model, wire_dtype=torch.bfloat16, transport="shm")
        for iteration in range(3):
            ours.zero_grad()
            loss = sum(m(batch(rank, iteration, 3, 4).to(m.weight.dtype)).float().square().mean() for m in model)
            loss.backward()
        assert [m.weight.grad.dtype for m in model] == [torch.float32, torch.float64, torch.bfloat16]
        exact = model[1].weight.grad.clone()
        reference = copy.deepcopy(model[1])
        reference.zero_grad()
        for r in range(world):
            (reference(batch(r, 2, 3, 4).double()).square().mean() / world).backward()
        torch.testing.assert_close(exact, reference.weight.grad, rtol=1e-6, atol=1e-7)  # the loss is of fp32
        same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_model_moved_to_another_dtype_gets_its_gradients_in_that_one():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), wire_dtype=torch.bfloat16)
        for iteration, dtype in enumerate([torch.float32, torch.float64, torch.float64, torch.float32, torch.float32]):
            ours.to(dtype)
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24).to(dtype)).square().mean().backward()
            assert {p.grad.dtype for p in ours.parameters()} == {dtype}
            same_on_all_ranks(p.grad for p in ours.parameters())
            losses = [lambda m, r=r, i=iteration: m(batch(r, i, 5, 24)).square().mean() for r in range(world)]
            assert_close = torch.testing.assert_close
            for name, p in ours.module.named_parameters():
                mean = sum(part[name] for part in local_gradients(model, losses)) / world
                assert_close(p.grad.float(), mean, rtol=2 * UNIT[torch.bfloat16], atol=1e-3)

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_beyond_the_range_of_float16_is_infinite_on_every_rank(transport):
    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), transport=transport, wire_dtype=torch.float16)
        ours(torch.tensor([[1e6 if rank == 0 else 1.0]])).sum().backward()
        return ours.module.weight.grad.item()

    assert run_ranks(body, 2) == [float("inf")] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sum_beyond_the_range_of_float16_is_no_overflow(transport):
    """Contributions are divided by the number of ranks before they are added."""

    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), transport=transport, wire_dtype=torch.float16)
        ours(torch.tensor([[60000.0]])).sum().backward()
        return ours.module.weight.grad.item()

    assert run_ranks(body, 3) == [torch.tensor(60000.0).half().item()] * 3


def test_half_as_many_bytes_travel():
    def body(rank, world, wire):
        ours = Ours(mlp(), wire_dtype=wire, transport="shm")
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        events = ours.trace()
        return [sum(e.nbytes for e in events if e.kind == kind) for kind in ("reduce", "unpack")]

    (wide, nothing), *_ = run_ranks(body, 2, None)
    (narrow, unpacked), *_ = run_ranks(body, 2, torch.bfloat16)
    assert nothing == 0
    assert narrow == wide / 2
    assert unpacked == sum(p.numel() * 4 for p in mlp().parameters())


@pytest.mark.parametrize(("world", "kind"), [(2, "all_gather"), (3, "all_reduce")])
def test_over_a_process_group_gradients_travel_in_16_bits_too(world, kind):
    def body(rank, world):
        calls = []

        class Recording(C10dTransport):
            def all_reduce(self, x, op):
                calls.append(("all_reduce", x.nbytes))
                return super().all_reduce(x, op)

            def all_gather(self, output, source):
                calls.append(("all_gather", source.nbytes))
                return super().all_gather(output, source)

        ours = Ours(mlp(), wire_dtype=torch.bfloat16, transport=Recording(dist.group.WORLD, 30.0))
        calls.clear()
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        return calls

    calls = run_ranks(body, world)[0]
    wire_bytes = sum(nbytes for _, nbytes in calls[:-1])  # the last one is the header
    assert {kind for kind, _ in calls[:-1]} == {kind}
    assert wire_bytes == sum(-(-p.numel() // 16) * 16 * 2 for p in mlp().parameters())


def test_the_variable_counts_where_no_argument_is_given(monkeypatch):
    def body(rank, world, argument):
        ours = Ours(mlp(), wire_dtype=argument)
        return {bucket.dtype for bucket in ours._reduction.plan.buckets}

    monkeypatch.setenv("GPUCOMM_WIRE_DTYPE", "bfloat16")
    assert run_ranks(body, 2, None) == [{"bfloat16"}] * 2
    assert run_ranks(body, 2, torch.float16) == [{"float16"}] * 2


def test_ranks_that_ask_for_different_wires_are_refused_on_every_rank():
    def body(rank, world):
        Ours(mlp(), wire_dtype=torch.bfloat16 if rank == 0 else None)

    for outcome in run_ranks(body, 2, expect_failures=True):
        assert outcome.error_type == "CommError"
        assert "wire dtype differs between ranks: 'torch.float32 as torch.bfloat16' on rank 0" in outcome.error_text


def test_a_communication_hook_is_refused_beside_it():
    def body(rank, world):
        ours = Ours(mlp(), wire_dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="a communication hook beside wire_dtype="):
            ours.register_comm_hook(None, default_hooks.allreduce_hook)

    run_ranks(body, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_weighted_mean_is_one_of_fp32(transport):
    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), transport=transport, wire_dtype=torch.bfloat16)
        for _ in range(2):
            ours.zero_grad()
            with ours.weight(1 + 2 * rank):
                ours(torch.tensor([[2.0 + rank]])).sum().backward()
        return ours.module.weight.grad.item()

    first, second = run_ranks(body, 2)  # (2 + 3) / (1 + 3)
    assert first == second == pytest.approx(1.25, rel=2 * UNIT[torch.bfloat16])


def test_an_overflow_of_float16_is_not_finite_to_the_policy():
    def body(rank, world):
        ours = Ours(nn.Linear(1, 1, bias=False), transport="shm", wire_dtype=torch.float16, nonfinite="raise")
        ours(torch.tensor([[1e6 if rank == 1 else 1.0]])).sum().backward()

    for outcome in run_ranks(body, 2, expect_failures=True):
        assert outcome.error_type == "NonFinite"
        assert "rank 1" in outcome.error_text


@pytest.mark.parametrize("value", [torch.float32, torch.int8, "bfloat16", 16])
def test_another_dtype_is_refused(value):
    def body(rank, world):
        Ours(mlp(), wire_dtype=value)

    (outcome,) = run_ranks(body, 1, expect_failures=True)
    assert outcome.error_type == "ValueError"
    assert f"wire_dtype is {value!r}, accepted are None, torch.bfloat16 and torch.float16" in outcome.error_text


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("GPUCOMM_WIRE_DTYPE", "int8")
    (outcome,) = run_ranks(lambda rank, world: Ours(mlp()), 1, expect_failures=True)
    assert "GPUCOMM_WIRE_DTYPE is 'int8', accepted are bfloat16, float16" in outcome.error_text
