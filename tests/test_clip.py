"""clip_grad_norm_ of the wrapper, beside torch's on the same gradients."""

import pytest
import torch
from expect import raises
from ranks import run_ranks
from torch.nn.parallel.distributed import _MixedPrecision
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours

SMALL = 0.001  # MB: several buckets


def loss_of(module, rank, iteration):
    return 50 * module(batch(rank, iteration, 5, 24)).square().mean()


def references(ours, max_norm, norm_type=2.0, dtype=None):
    """What torch makes of copies of the gradients; of wide ones, whose sums are exact enough to compare with."""
    copies = []
    for param in ours.parameters():
        copy = torch.nn.Parameter(param.detach().to(dtype or param.dtype))
        copy.grad = None if param.grad is None else param.grad.clone().to(copy.dtype)
        copies.append(copy)
    total = torch.nn.utils.clip_grad_norm_(copies, max_norm, norm_type)
    return total, [copy.grad for copy in copies]


def check(ours, max_norm, norm_type=2.0, dtype=None, tolerance=None):
    expected, grads = references(ours, max_norm, norm_type, dtype)
    total = ours.clip_grad_norm_(max_norm, norm_type)
    torch.testing.assert_close(total.double(), expected.double(), **(tolerance or {"rtol": 1e-5, "atol": 0}))
    for param, grad in zip(ours.parameters(), grads, strict=True):
        if grad is None:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad, grad.to(param.dtype), **(tolerance or {"rtol": 1e-5, "atol": 1e-7}))
    return total


def step(ours, rank, iteration):
    ours.zero_grad()
    loss_of(ours, rank, iteration).backward()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_norm_and_gradients_are_as_torch_makes_them(norm_type, max_norm):
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=SMALL)
        for iteration in range(3):
            step(ours, rank, iteration)
            check(ours, max_norm, norm_type)

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, {"rtol": 2e-2, "atol": 1e-3}), (torch.float64, {"rtol": 1e-12, "atol": 1e-14})],
)
def test_other_dtypes(dtype, tolerance):
    def body(rank, world):
        ours = Ours(mlp().to(dtype))
        for iteration in range(3):
            ours.zero_grad()
            (50 * ours(batch(rank, iteration, 5, 24).to(dtype)).square().mean()).backward()
            total = check(ours, 0.5, dtype=torch.float64, tolerance=tolerance)
            assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    run_ranks(body, 1)


def test_every_rank_gets_the_same_bits():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=SMALL)
        totals = []
        for iteration in range(4):
            step(ours, rank, iteration)
            totals.append(ours.clip_grad_norm_(1.0).item())
        return totals

    first, *others = run_ranks(body, 3)
    assert all(other == first for other in others)
    assert len(set(first)) == 4


def test_what_the_program_did_to_gradients_after_backward_counts():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=SMALL)
        changes = [
            lambda p: p[0].grad.mul_(3),
            lambda p: setattr(p[1], "grad", None),
            lambda p: setattr(p[2], "grad", torch.full_like(p[2], 2.0)),
            lambda p: [x.grad.div_(7) for x in p],
            lambda p: p[0].grad.zero_(),
        ]
        for iteration, change in enumerate(changes * 2):
            step(ours, rank, iteration)
            change(list(ours.parameters()))
            check(ours, 0.3)
            check(ours, 0.1)  # again, of what was clipped

    run_ranks(body, 2)


def test_unused_parameters_and_those_that_only_accumulate_count_as_torch_counts_them():
    def body(rank, world):
        model = mlp()
        extra = torch.nn.Linear(24, 24)
        model.extra = extra
        ours = Ours(model, find_unused_parameters=True, bucket_cap_mb=SMALL)

        def run(iteration, with_extra):
            x = batch(rank, iteration, 5, 24)
            x = extra(x) if with_extra else x
            for layer in list(model)[:-1]:
                x = layer(x)
            return x

        model.forward = lambda x, e: run(int(x[0]), e)  # x: the iteration
        for iteration, used in enumerate([False, True, False, True]):
            ours.zero_grad()
            ours(torch.tensor([float(iteration)]), used).square().sum().backward()
            assert (extra.weight.grad is None) == (not used)
            check(ours, 0.2)
        with ours.no_sync():
            ours.zero_grad()
            ours(torch.tensor([9.0]), True).square().sum().backward()
        check(ours, 0.2)
        ours(torch.tensor([9.0]), False).square().sum().backward()
        check(ours, 0.2)

    run_ranks(body, 2)


def test_wire_dtype_and_a_weight_and_ignored_parameters():
    def body(rank, world):
        ours = Ours(mlp(), wire_dtype=torch.bfloat16, bucket_cap_mb=SMALL)
        for iteration in range(3):
            step(ours, rank, iteration)
            check(ours, 0.2)
        model = mlp()
        Ours._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        ours = Ours(model)
        for iteration in range(2):
            step(ours, rank, iteration)
            assert ours.module[0].weight.grad is not None
            check(ours, 0.2)

    run_ranks(body, 2)


def test_a_norm_that_is_not_finite_raises_if_asked_to_and_scales_otherwise():
    def body(rank, world):
        ours = Ours(mlp())
        step(ours, rank, 0)
        with torch.no_grad():
            ours.module[0].weight.grad[0, 0] = float("inf")
        before = [param.grad.clone() for param in ours.parameters()]
        raises(RuntimeError, "is non-finite", lambda: ours.clip_grad_norm_(1.0, error_if_nonfinite=True))
        for param, grad in zip(ours.parameters(), before, strict=True):
            assert torch.equal(param.grad, grad)
        assert ours.clip_grad_norm_(1.0).item() == float("inf")
        assert torch.isnan(ours.module[0].weight.grad[0, 0])

    run_ranks(body, 1)


def test_a_norm_that_is_no_number_is_gone_in_the_next_iteration():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=SMALL)
        for iteration in range(4):
            ours.zero_grad()
            (loss_of(ours, rank, iteration) * (float("nan") if iteration == 1 else 1.0)).backward()
            if iteration == 1:
                assert torch.isnan(ours.clip_grad_norm_(0.1))
            else:
                check(ours, 0.1)

    run_ranks(body, 2)


def test_what_a_slot_without_a_gradient_holds_is_neither_counted_nor_scaled():
    def body(rank, world):
        model = mlp()
        model.extra = torch.nn.Linear(24, 24)
        model.forward = lambda x: model[0](x)
        ours = Ours(model, find_unused_parameters=True)
        for iteration in range(3):
            ours.zero_grad()
            model.extra.weight.grad = torch.ones(24, 24)  # past the hooks: it travels, and nobody used it
            ours(batch(rank, iteration, 5, 24)).sum().backward()
            model.extra.weight.grad = None
            check(ours, 0.1)
            if iteration == 1:
                kept = model[0].weight.grad
                copy = kept.clone()
        model[0].weight.grad = kept
        model[0].weight.grad = None
        check(ours, 0.01)
        assert torch.equal(kept, copy)

    run_ranks(body, 2)


@pytest.mark.parametrize("max_norm", [1.0, -1.0])
def test_without_gradients_the_norm_is_zero(max_norm):
    def body(rank, world):
        ours = Ours(mlp())
        assert check(ours, max_norm).item() == 0
        step(ours, rank, 0)
        ours.zero_grad()
        assert check(ours, max_norm).item() == 0

    run_ranks(body, 1)


def test_wide_gradients_that_travel_in_fp32():
    def body(rank, world):
        ours = Ours(mlp().double(), mixed_precision=_MixedPrecision(reduce_dtype=torch.float32))
        for iteration in range(2):
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24).double()).square().sum().backward()
            assert check(ours, 0.1, tolerance={"rtol": 1e-6, "atol": 1e-12}).dtype == torch.float64

    run_ranks(body, 1)


def test_a_gradient_that_autograd_saved_and_clipping_changed_raises():
    def body(rank, world):
        ours = Ours(mlp())
        step(ours, rank, 0)
        grad = ours.module[0].weight.grad
        x = torch.ones_like(grad, requires_grad=True)
        y = (grad * x).sum()  # saves the gradient
        ours.clip_grad_norm_(1e-3)
        raises(RuntimeError, "modified by an inplace operation", y.backward)

    run_ranks(body, 1)
