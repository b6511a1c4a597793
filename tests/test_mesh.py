"""device_mesh=: data parallel over one dimension of a mesh, tensor parallel over the other."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm.errors import ReplicasDiffer

TRANSPORTS = ["shm", "c10d"]


class Block(nn.Module):
    """Split by columns, split by rows, a norm with a part of the sequence on each rank, and a head that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.extra = nn.Linear(8, 3)

    def forward(self, x, extra=False):
        x = self.norm(self.down(torch.relu(self.up(x))))
        return self.extra(x) if extra else self.head(x)


def parallel_block(mesh):
    """Block, tensor parallel over the mesh: every parameter is distributed, the norm's gradients are partial sums."""
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "extra": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(Block(), mesh, plan)


def two_by_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sequences(row, iteration):
    return batch(row, iteration, 3, 4, 8)


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def reference_losses(iterations, rows=2, make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), clip=None):
    """Losses of one process over the batches of all rows, and its parameters at the end."""
    model = Block()
    optimizer = make_optimizer(model.parameters())
    losses, norms = [], []
    for iteration in range(iterations):
        optimizer.zero_grad()
        loss = sum(model(sequences(row, iteration), iteration % 2 == 1).square().mean() for row in range(rows)) / rows
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.named_parameters())


def train(ours, mesh, iterations, optimizer, start=0, clip=None):
    losses, norms = [], []
    for iteration in range(start, start + iterations):
        optimizer.zero_grad()
        loss = ours(sequences(mesh["dp"].get_local_rank(), iteration), iteration % 2 == 1).square().mean()
        loss.backward()
        if clip is not None:
            norms.append(full(nn.utils.clip_grad_norm_(ours.parameters(), clip)).item())
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        losses.append(mean.item() / mesh["dp"].size())
    return losses, norms


def unused_allowed(mesh, **options):
    return Ours(parallel_block(mesh["tp"]), device_mesh=mesh["dp"], find_unused_parameters=True, **options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_losses_and_parameters_are_those_of_one_process(transport):
    expected, _, parameters = reference_losses(5)

    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh, transport=transport)
        losses, _ = train(ours, mesh, 5, torch.optim.AdamW(ours.parameters(), lr=0.05))
        for name, param in ours.module.named_parameters():
            torch.testing.assert_close(full(param), parameters[name].detach(), rtol=1e-4, atol=1e-5, msg=name)
        return losses

    for losses in run_ranks(body, 4):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_gradients_are_placed_as_their_parameters_and_lie_in_the_buckets():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        ours(sequences(rank // 2, 0)).square().mean().backward()
        model = Block()
        (sum(model(sequences(row, 0)).square().mean() for row in range(2)) / 2).backward()
        for index, (name, param) in enumerate(ours.module.named_parameters()):
            expected = model.get_parameter(name).grad
            if expected is None:
                assert param.grad is None
                continue
            assert param.grad.placements == param.placements, name
            assert param.grad.to_local().data_ptr() == ours._reduction.slots.view(index).data_ptr(), name
            torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-6, msg=name)
        assert isinstance(ours.module.norm.weight.placements[0], Replicate)

    run_ranks(body, 4)


def test_clip_grad_norm_sees_the_norm_of_one_process():
    expected, norms, _ = reference_losses(4, clip=0.05)

    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        return train(ours, mesh, 4, torch.optim.AdamW(ours.parameters(), lr=0.05), clip=0.05)

    for losses, clipped in run_ranks(body, 4):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(norms, rel=1e-5)


def test_accumulation_under_no_sync():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        row = mesh["dp"].get_local_rank()
        for iteration in range(3):
            ours.zero_grad(set_to_none=iteration != 1)
            with ours.no_sync():
                ours(sequences(row, 10 * iteration)).square().mean().backward()
            ours(sequences(row, 10 * iteration + 1)).square().mean().backward()
            model = Block()
            total = sum(model(sequences(r, 10 * iteration + k)).square().mean() for r in range(2) for k in range(2))
            (total / 2).backward()
            for name, param in ours.module.named_parameters():
                if (expected := model.get_parameter(name).grad) is not None:
                    torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(body, 4)


def test_a_branch_that_only_one_row_takes_and_one_that_nobody_takes():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        row = mesh["dp"].get_local_rank()
        for iteration, extra in enumerate([(False, True), (True, False), (True, True), (False, False)]):
            ours.zero_grad()
            ours(sequences(row, iteration), extra[row]).square().mean().backward()
            model = Block()
            (sum(model(sequences(r, iteration), extra[r]).square().mean() for r in range(2)) / 2).backward()
            for name, param in ours.module.named_parameters():
                expected = model.get_parameter(name).grad
                if expected is None:
                    assert param.grad is None, name
                else:
                    torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(body, 4)


def test_a_distributed_gradient_that_the_program_keeps_is_never_overwritten():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        row = mesh["dp"].get_local_rank()
        kept = []
        for iteration in range(6):
            ours.zero_grad()
            ours(sequences(row, iteration)).square().mean().backward()
            for param in ours.parameters():
                if param.grad is None:
                    continue
                kind = iteration % 3
                grad = param.grad if kind == 0 else param.grad.to_local() if kind == 1 else param.grad.to_local()[:1]
                kept.append((grad, grad.clone()))
        for grad, clone in kept:
            assert torch.equal(full(grad), full(clone))

    run_ranks(body, 4)


def test_memory_is_used_again_when_nobody_keeps_gradients():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        row = mesh["dp"].get_local_rank()
        places = []
        for iteration in range(6):
            if iteration % 2:
                ours.zero_grad()  # else the gradients of before are added to
            ours(sequences(row, iteration)).square().mean().backward()
            places.append(ours.module.up.weight.grad.to_local().data_ptr())
        return len(set(places[1:]))  # after the first iteration there is a new plan

    assert run_ranks(body, 4) == [1] * 4


def test_state_dict_is_that_of_the_module_before_and_after_a_step():
    def body(rank, world):
        mesh = two_by_two()
        module = parallel_block(mesh["tp"])
        before = {name: (type(value), value.placements, value.shape) for name, value in module.state_dict().items()}
        ours = Ours(module, device_mesh=mesh["dp"], find_unused_parameters=True)

        def check():
            found = {name: (type(v), v.placements, v.shape) for name, v in ours.state_dict().items()}
            assert found == {f"module.{name}": described for name, described in before.items()}
            assert {n: (type(v), v.placements, v.shape) for n, v in get_model_state_dict(ours).items()} == before

        check()
        train(ours, mesh, 1, torch.optim.SGD(ours.parameters(), lr=0.1))
        check()
        for name, param in ours.module.named_parameters():
            assert isinstance(param, nn.Parameter), name
            assert isinstance(param, DTensor), name

    run_ranks(body, 4)


def test_a_run_resumed_from_a_distributed_checkpoint_goes_on_as_if_never_interrupted(tmp_path):
    expected, _, _ = reference_losses(6)

    def build(mesh):
        ours = unused_allowed(mesh)
        return ours, torch.optim.AdamW(ours.parameters(), lr=0.05)

    def save(rank, world):
        mesh = two_by_two()
        ours, optimizer = build(mesh)
        losses, _ = train(ours, mesh, 3, optimizer)
        model_state, optimizer_state = get_state_dict(ours, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        return losses

    def resume(rank, world):
        mesh = two_by_two()
        ours, optimizer = build(mesh)
        with torch.no_grad():
            for param in ours.parameters():
                param.zero_()
        model_state, optimizer_state = get_state_dict(ours, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(ours, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return train(ours, mesh, 3, optimizer, start=3)[0]

    for losses in run_ranks(save, 4):
        assert losses == pytest.approx(expected[:3], rel=1e-5)
    for losses in run_ranks(resume, 4):
        assert losses == pytest.approx(expected[3:], rel=1e-5)

    def read_alone(rank, world):
        model = Block()
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=tmp_path)
        return dict(state["model"])

    (saved,) = run_ranks(read_alone, 1)
    for name, param in reference_losses(3)[2].items():
        torch.testing.assert_close(saved[name], param.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_rows_start_from_the_values_of_the_first_one():
    def body(rank, world):
        mesh = two_by_two()
        module = parallel_block(mesh["tp"])
        with torch.no_grad():
            for param in module.parameters():
                param.to_local().add_(rank)
        before = {name: param.to_local().clone() for name, param in module.named_parameters()}
        ours = Ours(module, device_mesh=mesh["dp"], find_unused_parameters=True)
        row = mesh["dp"].get_local_rank()
        # Ranks 2 and 3 take what 0 and 1 have: theirs, less what they are apart.
        return all(
            torch.allclose(param.to_local(), before[name] - 2 * row, atol=1e-5)
            for name, param in ours.module.named_parameters()
        )

    assert run_ranks(body, 4) == [True] * 4


def test_plain_parameters_beside_distributed_ones():
    def body(rank, world):
        mesh = two_by_two()
        model = Block()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        ours = Ours(
            parallelize_module(copy.deepcopy(model), mesh["tp"], plan),
            device_mesh=mesh["dp"],
            find_unused_parameters=True,
        )
        row = mesh["dp"].get_local_rank()
        for iteration in range(3):
            ours.zero_grad()
            model.zero_grad()
            ours(sequences(row, iteration)).square().mean().backward()
            (sum(model(sequences(r, iteration)).square().mean() for r in range(2)) / 2).backward()
            for name, param in ours.module.named_parameters():
                if (expected := model.get_parameter(name).grad) is not None:
                    torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(body, 4)


def test_a_narrow_wire_under_tensor_parallelism():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh, wire_dtype=torch.bfloat16)
        row = mesh["dp"].get_local_rank()
        for iteration in range(3):
            ours.zero_grad()
            ours(sequences(row, iteration)).square().mean().backward()
            model = Block()
            (sum(model(sequences(r, iteration)).square().mean() for r in range(2)) / 2).backward()
            for name, param in ours.module.named_parameters():
                if (expected := model.get_parameter(name).grad) is not None:
                    assert param.grad.dtype == torch.float32
                    atol = 2**-6 * expected.abs().max().item()
                    torch.testing.assert_close(full(param.grad), expected, rtol=0, atol=atol, msg=name)

    run_ranks(body, 4)


def test_a_second_gradient_of_the_same_backward_is_reduced_too():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        row = mesh["dp"].get_local_rank()

        def run(model, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(
                    lambda x: model(x)[..., :1].expand(3, 4, 8), x, use_reentrant=True
                )
            return x.square().mean()

        for iteration in range(2):
            ours.zero_grad()
            run(ours.module, sequences(row, iteration).requires_grad_()).backward()
            model = Block()
            (sum(run(model, sequences(r, iteration).requires_grad_()) for r in range(2)) / 2).backward()
            for name, param in ours.module.named_parameters():
                if (expected := model.get_parameter(name).grad) is not None:
                    torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(body, 4)


def test_a_parameter_unfrozen_after_wrapping():
    def body(rank, world):
        mesh = two_by_two()
        module = parallel_block(mesh["tp"])
        module.up.weight.requires_grad_(False)
        ours = Ours(module, device_mesh=mesh["dp"], find_unused_parameters=True)
        row = mesh["dp"].get_local_rank()
        for iteration in range(3):
            ours.module.up.weight.requires_grad_(iteration > 0)
            ours.zero_grad()
            ours(sequences(row, iteration)).square().mean().backward()
            model = Block()
            (sum(model(sequences(r, iteration)).square().mean() for r in range(2)) / 2).backward()
            if iteration > 0:
                torch.testing.assert_close(full(ours.module.up.weight.grad), model.up.weight.grad)

    run_ranks(body, 4)


def test_an_audit_compares_the_parts_that_ranks_have_in_common():
    def body(rank, world):
        mesh = two_by_two()
        ours = unused_allowed(mesh)
        train(ours, mesh, 2, torch.optim.SGD(ours.parameters(), lr=0.1))
        assert ours.audit().parameters == len(list(ours.parameters()))
        if rank == 3:
            with torch.no_grad():
                ours.module.down.weight.to_local()[0, 0] += 1
        if mesh["tp"].get_local_rank() == 1:
            with pytest.raises(ReplicasDiffer, match=r"'down\.weight'"):
                ours.audit()
        else:
            ours.audit()

    run_ranks(body, 4)


# ---- the arguments


def test_a_mesh_of_one_dimension_is_a_group():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2,))
        ours = Ours(mlp(), device_mesh=mesh)
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        assert ours.device_mesh is mesh
        assert ours.process_group is mesh.get_group()
        return ours.module[0].weight.grad

    first, second = run_ranks(body, 2)
    assert torch.equal(first, second)


def test_a_group_and_a_mesh_contradict_each_other():
    def body(rank, world):
        Ours(mlp(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))

    for outcome in run_ranks(body, 2, expect_failures=True):
        assert outcome.error_type == "RuntimeError"
        assert "Cannot specify both process_group and device_mesh arguments." in outcome.error_text


def test_a_mesh_of_two_dimensions_is_refused():
    def body(rank, world):
        Ours(mlp(), device_mesh=two_by_two())

    for outcome in run_ranks(body, 4, expect_failures=True):
        assert outcome.error_type == "RuntimeError"
        assert "Only 1D device mesh is supported, but got DeviceMesh" in outcome.error_text


def test_what_is_no_mesh_is_refused():
    (outcome,) = run_ranks(lambda rank, world: Ours(mlp(), device_mesh=(2, 2)), 1, expect_failures=True)
    assert outcome.error_type == "TypeError"
    assert "device_mesh is (2, 2), accepted is" in outcome.error_text


def test_gradients_are_not_reduced_among_ranks_that_hold_different_parts():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2,))
        Ours(parallelize_module(Block(), mesh, {"up": ColwiseParallel()}))

    for rank, outcome in enumerate(run_ranks(body, 2, expect_failures=True)):
        assert outcome.error_type == "ValueError"
        assert "parameter 'up.weight' is distributed over DeviceMesh" in outcome.error_text
        assert f"rank(s) [{1 - rank}] of the process group" in outcome.error_text


def test_rows_whose_parameters_are_placed_differently_are_told_so():
    def body(rank, world):
        mesh = two_by_two()
        module = Block()
        placement = Replicate() if rank < 2 else Shard(0)

        def place(name, part, tp):
            for key, param in part.named_parameters(recurse=False):
                wide = param.repeat_interleave(2, 0) if rank >= 2 else param
                part.register_parameter(key, nn.Parameter(distribute_tensor(wide.detach(), tp, [placement])))

        distribute_module(module, mesh["tp"], place)
        Ours(module, device_mesh=mesh["dp"])

    for outcome in run_ranks(body, 4, expect_failures=True):
        assert outcome.error_type == "ModelsDiffer"
        assert "parameter 0 ('up.weight') has placement (Replicate(),)" in outcome.error_text


def test_a_tensor_without_memory_of_its_own_is_refused_by_collectives():
    def body(rank, world):
        from gpucomm import Communicator

        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        with pytest.raises(ValueError, match="expected an array with memory, this DTensor has none of its own"):
            Communicator().all_reduce(x)

    run_ranks(body, 2)
