"""SyncBatchNorm on the CPU, against batch norm of one process over the batches of all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from expect import raises
from ranks import run_ranks
from torch import nn

from gpucomm import DistributedDataParallel as Ours
from gpucomm.ddp.sync_batch_norm import SyncBatchNorm

SHAPES = {"2d": (), "3d": (7,), "4d": (3, 5), "5d": (2, 3, 2)}
PLAIN = {"2d": nn.BatchNorm1d, "3d": nn.BatchNorm1d, "4d": nn.BatchNorm2d, "5d": nn.BatchNorm3d}


def batches(sizes, rest, iteration, dtype=torch.float64):
    generator = torch.Generator().manual_seed(iteration + 1)
    return [
        torch.randn(size, 3, *rest, generator=generator, dtype=torch.float64).mul(r + 1).add(r).to(dtype)
        for r, size in enumerate(sizes)
    ]


def wrapped(norm, transport="shm"):
    model = nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm)))
    return Ours(model, transport=transport, forward_sync_buffers=False)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (2, 5, 0)], ids=str)
def test_it_is_batch_norm_of_one_process_over_all_batches(sizes, dims, transport):
    """float64: outputs, running statistics, gradients of input, weight and bias over three iterations."""

    def body(rank, world):
        torch.manual_seed(0)
        norm = PLAIN[dims](3, dtype=torch.float64)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        ours = wrapped(norm, transport)
        for iteration in range(3):
            parts = batches(sizes, SHAPES[dims], iteration)
            whole = torch.cat(parts).requires_grad_()
            factor = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(iteration))
            norm.zero_grad()
            ours.zero_grad()
            expected = norm(whole)
            (expected * factor).sum().backward()
            start, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
            mine = parts[rank].clone().requires_grad_()
            output = ours(mine)
            (output * factor[start:end]).sum().backward()
            close = {"rtol": 1e-10, "atol": 1e-10}
            torch.testing.assert_close(output, expected[start:end], **close)
            torch.testing.assert_close(mine.grad, whole.grad[start:end], **close)
            layer = ours.module[0]
            torch.testing.assert_close(layer.weight.grad * world, norm.weight.grad, **close)
            torch.testing.assert_close(layer.bias.grad * world, norm.bias.grad, **close)
            torch.testing.assert_close(layer.running_mean, norm.running_mean, **close)
            torch.testing.assert_close(layer.running_var, norm.running_var, **close)
            assert layer.num_batches_tracked == norm.num_batches_tracked
        ours.eval()
        norm.eval()
        torch.testing.assert_close(ours(parts[rank]), norm(parts[rank]), **close)

    run_ranks(body, len(sizes))


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}],
    ids=str,
)
def test_options_mean_what_they_mean_for_batch_norm(options):
    def body(rank, world):
        norm = nn.BatchNorm2d(3, dtype=torch.float64, **options)
        ours = wrapped(nn.Sequential(norm, nn.Conv2d(3, 1, 1, dtype=torch.float64)))
        for iteration in range(3):
            parts = batches((4, 3), (3, 5), iteration)
            expected = norm(torch.cat(parts))
            output = ours.module[0][0](parts[rank])
            torch.testing.assert_close(output, expected.split([4, 3])[rank])
        for name, buffer in norm.named_buffers():
            torch.testing.assert_close(dict(ours.module[0][0].named_buffers())[name], buffer)
        norm.eval()
        ours.eval()
        if rank == 0:  # not collective: also of a layer that has no statistics but the batch's
            torch.testing.assert_close(ours.module[0][0](parts[rank]), norm(parts[rank]))

    run_ranks(body, 2)


@pytest.mark.parametrize("left", ["weight", "bias", "frozen"])
def test_gradients_come_for_what_is_there_and_trained(left):
    def body(rank, world):
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        ours = wrapped(nn.Sequential(norm, nn.Linear(3, 1, dtype=torch.float64)))
        layer = ours.module[0][0]
        for bn in (norm, layer):
            if left == "frozen":
                bn.requires_grad_(False)
            elif left == "weight":
                bn.register_parameter("bias", None)
            else:
                bn.register_parameter("weight", None)
        parts = batches((4, 3), (), 0)
        whole, mine = torch.cat(parts).requires_grad_(), parts[rank].requires_grad_()
        norm(whole).square().sum().backward()
        layer(mine).square().sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad.split([4, 3])[rank])
        for p, q in zip(norm.parameters(), layer.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (left == "frozen")

    run_ranks(body, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_have_statistics_in_float32(dtype):
    def body(rank, world):
        norm = nn.BatchNorm2d(3)
        ours = wrapped(norm)
        parts = batches((40, 30), (3, 5), 0, dtype)
        mine = parts[rank].clone().requires_grad_()
        output = ours(mine)
        output.float().square().sum().backward()
        assert output.dtype == mine.grad.dtype == dtype
        expected = norm(torch.cat(parts).float()).split([40, 30])[rank]
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.module[0].running_var, norm.running_var, rtol=1e-4, atol=1e-4)

    run_ranks(body, 2)


def test_ranks_have_bitwise_equal_running_statistics_whatever_their_batches():
    def body(rank, world):
        ours = wrapped(nn.BatchNorm1d(3))
        for iteration in range(4):
            ours(batches((2, 5, 3), (4,), iteration, torch.float32)[rank]).square().sum().backward()
        return ours.module[0].running_mean, ours.module[0].running_var

    first, *others = run_ranks(body, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_large_mean_does_not_cancel_the_variance():
    def body(rank, world):
        parts = [part.mul(0.01).add(1000.0).float() for part in batches((50, 50), (), 0)]
        ours = wrapped(nn.BatchNorm1d(3, momentum=1.0))
        ours(parts[rank]).sum().backward()
        torch.testing.assert_close(
            ours.module[0].running_var.double(), torch.cat(parts).double().var(0), rtol=1e-2, atol=0
        )

    run_ranks(body, 2)


def test_groups_of_ranks_can_have_statistics_of_their_own():
    def body(rank, world):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        layer = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm), groups[rank // 2])
        ours = Ours(nn.Sequential(layer), forward_sync_buffers=False)
        parts = batches((2, 3, 4, 5), (), 0)
        pair = parts[rank // 2 * 2 : rank // 2 * 2 + 2]
        torch.testing.assert_close(ours(parts[rank]), norm(torch.cat(pair)).split([len(p) for p in pair])[rank % 2])

    run_ranks(body, 4)


def test_it_keeps_being_torchs_layer_for_state_dicts_copies_and_frameworks():
    def body(rank, world):
        model = nn.Sequential(nn.SyncBatchNorm(3), nn.Linear(3, 1))
        names = list(model.state_dict())
        ours = Ours(model)
        assert isinstance(model[0], nn.SyncBatchNorm)
        assert type(model[0]) is SyncBatchNorm
        assert list(model.state_dict()) == names
        assert ours._get_ddp_logging_data()["has_sync_bn"] == 1
        twin = copy.deepcopy(ours)
        x = batches((4, 4), (), 0, torch.float32)[rank]
        for ddp in (ours, twin):
            ddp(x).sum().backward()
        assert torch.equal(model[0].weight.grad, twin.module[0].weight.grad)
        assert type(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))) is nn.SyncBatchNorm

    run_ranks(body, 2)


def test_a_subclass_with_a_forward_of_its_own_is_refused_as_torch_refuses_it():
    class Special(nn.SyncBatchNorm):
        pass

    def body(rank, world):
        raises(ValueError, "SyncBatchNorm layers only work with GPU modules", lambda: Ours(nn.Sequential(Special(3))))

    run_ranks(body, 1)


def test_nothing_to_normalise_on_any_rank_is_an_error():
    def body(rank, world):
        ours = wrapped(nn.BatchNorm1d(3))
        raises(ValueError, "more than 0 values per channel", lambda: ours(torch.empty(0, 3)))
        raises(ValueError, "at least 2D input", lambda: ours(torch.ones(3)))

    run_ranks(body, 2)


def test_a_second_derivative_is_refused_not_wrong():
    def body(rank, world):
        ours = wrapped(nn.BatchNorm1d(3, dtype=torch.float64))
        x = batches((4, 4), (), 0)[rank].requires_grad_()
        (grad,) = torch.autograd.grad(ours.module(x).square().sum(), x, create_graph=True)
        raises(RuntimeError, "once_differentiable", grad.sum().backward)

    run_ranks(body, 2)
