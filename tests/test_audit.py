"""audit(): what it finds and how it says so, what it leaves out, and when it runs by itself."""

import copy
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import ConvNet, Recurrent, TiedEmbedding, TwoHeads, batch, mlp

import gpucomm
from gpucomm import DistributedDataParallel as Ours
from gpucomm import ReplicasDiffer
from gpucomm.ddp import buffers
from gpucomm.ddp.difference import Replica

TRANSPORTS = ["shm", "c10d"]


def flip_bit(tensor, element=0, bit=0):
    """Flips a bit of the element's first byte, in place and past autograd."""
    flat = tensor.detach().contiguous().view(-1).clone()
    flat.view(torch.uint8)[element * tensor.element_size()] ^= 1 << bit
    tensor.data.copy_(flat.view(tensor.shape))


def found_by(call):
    with pytest.raises(ReplicasDiffer) as caught:
        call()
    return str(caught.value), caught.value.parameter, caught.value.ranks


def step(ours, rank, iteration, optimizer=None, width=24):
    ours.zero_grad()
    ours(batch(rank, iteration, 5, width)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_flipped_bit_on_one_of_three_ranks_is_named_on_all(transport):
    def body(rank, world):
        ours = Ours(mlp(), transport=transport, bucket_cap_mb=0.003)
        step(ours, rank, 0)
        assert ours.audit().parameters == 8
        weight = ours.module[2].weight
        before = weight[3, 5].item()
        if rank == 2:
            flip_bit(weight, element=3 * 24 + 5)
        return *found_by(ours.audit), before, weight[3, 5].item()

    outcomes = run_ranks(body, 3)
    assert len({text for text, *_ in outcomes}) == 1
    text, name, ranks, right, _ = outcomes[0]
    wrong = outcomes[2][-1]
    assert (name, ranks) == ("2.weight", [2])
    assert right != wrong
    assert text == (
        "the replicas differ after iteration 1: parameter '2.weight' on rank 2: first in element 77, at [3, 5], "
        f"which is {right!r} on ranks 0 and 1, {wrong!r} on rank 2"
    )


def test_between_two_ranks_both_are_named():
    def body(rank, world):
        ours = Ours(mlp())
        if rank == 0:
            flip_bit(ours.module[0].bias)
        return found_by(ours.audit)

    for text, name, ranks in run_ranks(body, 2):
        assert (name, ranks) == ("0.bias", [0, 1])
        assert text.startswith("the replicas differ before the first iteration: parameter '0.bias' on ranks 0 and 1: ")


def test_without_a_majority_all_ranks_are_named_and_the_smaller_part_where_there_is_one():
    def body(rank, world):
        ours = Ours(mlp())
        if rank >= 2:
            flip_bit(ours.module[0].bias)
        tied = found_by(ours.audit)
        if rank == 2:
            flip_bit(ours.module[0].bias)
        return tied[2], found_by(ours.audit)[2]

    assert run_ranks(body, 4) == [([0, 1, 2, 3], [3])] * 4


def test_ranks_are_those_of_the_default_group():
    def body(rank, world):
        group = dist.new_group([0, 2, 3])
        if rank == 1:
            return None
        ours = Ours(mlp(), process_group=group)
        if rank == 3:
            flip_bit(ours.module[0].bias)
        return found_by(ours.audit)

    first, _, third, fourth = run_ranks(body, 4)
    for text, _, ranks in (first, third, fourth):
        assert ranks == [3]
        assert re.search("'0.bias' on rank 3: .* on ranks 0 and 2, .* on rank 3$", text)


def test_the_first_of_several_in_the_modules_order_is_named_and_the_others_are_counted():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=0)
        if rank == 1:
            for index in (6, 4, 2):
                flip_bit(ours.module[index].bias)
        return found_by(ours.audit)

    for text, name, _ in run_ranks(body, 3):
        assert name == "2.bias"
        assert text.endswith("; so do 2 other tensors")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("element", [0, 255, 256, 65_535, 65_536, 299_999])
def test_the_first_element_of_a_large_tensor_is_found(element, transport):
    def body(rank, world):
        ours = Ours(nn.Linear(1000, 300, bias=False), transport=transport)
        if rank == 1:
            for at in {element, 299_999}:
                flip_bit(ours.module.weight, at)
        return found_by(ours.audit)[0]

    for text in run_ranks(body, 2):
        assert f"element {element}, at [{element // 1000}, {element % 1000}]," in text


KINDS = {
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.ones(3, 5, dtype=torch.bfloat16),
    "float16": torch.ones(7, dtype=torch.float16),
    "float64": torch.ones(2, 2, dtype=torch.float64),
    "complex64": torch.full((3,), 1 + 2j, dtype=torch.complex64),
    "conjugate": torch.full((3,), 1 + 2j, dtype=torch.complex128).conj(),
    "int8": torch.arange(5, dtype=torch.int8),
    "int16": torch.arange(6, dtype=torch.int16).view(2, 3),
    "uint8": torch.arange(300).to(torch.uint8),
    "int64": torch.tensor(4),
    "float8": torch.ones(9).to(torch.float8_e4m3fn),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(40.0).view(5, 8)[:, ::2],
    "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_dtype_and_layout_are_compared(kind):
    def body(rank, world):
        module = mlp()
        module.register_buffer("other", KINDS[kind])
        module.register_buffer("nothing", torch.empty(0, 3))
        ours = Ours(module)
        report = ours.audit()
        assert (report.parameters, report.buffers) == (8, 2)
        assert report.nbytes == sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
        last = ours.module.other.numel() - 1
        if rank == 1:
            flip_bit(ours.module.other, last)
        return last, found_by(ours.audit)

    for last, (text, name, _) in run_ranks(body, 2):
        assert name == "other"
        assert f"buffer 'other' on ranks 0 and 1: first in element {last}, at" in text


def test_layouts_that_differ_between_ranks_do_not_matter():
    def body(rank, world):
        ours = Ours(ConvNet())
        if rank == 1:
            ours.module.to(memory_format=torch.channels_last)
            assert ours.module.conv.weight.stride() != ConvNet().conv.weight.stride()
        ours.audit()
        if rank == 1:
            flip_bit(ours.module.conv.weight, element=20)
        return found_by(ours.audit)[0]

    for text in run_ranks(body, 2):
        assert "element 20, at [2, 0, 0, 2]," in text


def test_a_dtensor_is_read_in_its_local_part():
    def body(rank, world):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = torch.arange(24.0).view(4, 6)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        replica = Replica(["w"], [sharded], {})
        assert replica.bytes_of(0).view(torch.float32).tolist() == whole[2 * rank : 2 * rank + 2].flatten().tolist()
        assert replica.describe(0) == ("parameter", torch.Size([2, 6]), "torch.float32")

    run_ranks(body, 2)


def test_bits_are_compared_and_not_values():
    def body(rank, world):
        ours = Ours(mlp())
        bias = ours.module[0].bias
        with torch.no_grad():
            bias[1] = float("nan")
            ours.audit()
            bias[0] = 0.0 if rank == 0 else -0.0
            zeros = found_by(ours.audit)[0]
            bias[0] = 0.0
            bias.view(torch.int32)[1] += rank
        return zeros, found_by(ours.audit)[0]

    for zeros, nans in run_ranks(body, 2):
        assert "which is 0.0 on rank 0, -0.0 on rank 1" in zeros
        assert "which is nan (0x7fc00000) on rank 0, nan (0x7fc00001) on rank 1" in nans


@pytest.mark.parametrize("cap", [0, 0.005])
def test_plans_that_differ_are_told_from_tensors_that_do(cap):
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=cap if rank else 0.003)
        with pytest.raises(gpucomm.CommError, match="the bucket plans of the ranks differ"):
            ours.audit()
        if rank == 1:
            flip_bit(ours.module[2].bias)
        assert found_by(ours.audit)[1] == "2.bias"

    run_ranks(body, 2)


# ---- nothing to find


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", [mlp, ConvNet, TiedEmbedding, Recurrent, TwoHeads], ids=lambda m: m.__name__)
def test_nothing_is_found_in_a_normal_training(make, transport):
    def body(rank, world):
        ours = Ours(make(), transport=transport, audit_every=1, find_unused_parameters=True, bucket_cap_mb=0.0002)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
        for iteration in range(5):
            step(ours, rank, iteration, optimizer, {mlp: 24, TwoHeads: 6}.get(make, 36))
            report = ours.audit()
            assert report.parameters == len(list(ours.parameters()))
            assert report.nbytes >= sum(p.nbytes for p in ours.parameters())

    run_ranks(body, 3)


def test_training_goes_on_after_replicas_that_differ():
    def body(rank, world):
        ours = Ours(mlp())
        step(ours, rank, 0)
        saved = ours.module[0].bias[0].item()
        if rank == 1:
            flip_bit(ours.module[0].bias)
        found_by(ours.audit)
        ours.module[0].bias.data[0] = saved
        step(ours, rank, 1)
        ours.audit()

    run_ranks(body, 2)


def test_frozen_and_replaced_parameters_are_compared():
    def body(rank, world):
        module = mlp()
        module[0].weight.requires_grad_(False)
        ours = Ours(module)
        ours.module[2].bias = nn.Parameter(torch.full((24,), float(rank == 2)))
        replaced = found_by(ours.audit)[1:]
        ours.module[2].bias.data.zero_()
        if rank == 0:
            flip_bit(ours.module[0].weight)
        return replaced, found_by(ours.audit)[1:]

    assert run_ranks(body, 3) == [(("2.bias", [2]), ("0.weight", [0]))] * 3


# ---- buffers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_in_a_buffer_is_named(transport):
    def body(rank, world):
        ours = Ours(ConvNet(), transport=transport)
        step(ours, rank, 0, width=36)
        ours.sync_buffers()
        assert ours.audit().buffers == 3
        if rank == 0:
            flip_bit(ours.module.norm.running_var, element=2)
        return found_by(ours.audit)

    for text, name, ranks in run_ranks(body, 3):
        assert (name, ranks) == ("norm.running_var", [0])
        assert "buffer 'norm.running_var' on rank 0: first in element 2, at [2]," in text


def test_buffers_that_a_forward_may_have_changed_are_left_out_until_they_are_brought_together():
    def body(rank, world):
        ours = Ours(ConvNet())
        assert ours.audit().buffers == 3
        ours(batch(rank, 0, 5, 36)).sum().backward()
        assert ours.audit().buffers == 0
        ours.sync_buffers()
        assert ours.audit().buffers == 3
        ours.eval()
        with torch.no_grad():
            ours(batch(rank, 1, 5, 36))
        assert ours.audit().buffers == 3

    run_ranks(body, 2)


@pytest.mark.parametrize("backward", [True, False])
def test_buffers_are_left_out_after_a_forward_past_the_wrapper(backward):
    def body(rank, world):
        ours = Ours(ConvNet())
        assert ours.audit().buffers == 3
        with nullcontext() if backward else torch.no_grad():
            loss = ours.module(batch(rank, 0, 5, 36)).square().mean()
        if backward:
            loss.backward()
        assert ours.audit().buffers == 0
        ours.sync_buffers()
        assert ours.audit().buffers == 3

    run_ranks(body, 2)


def test_buffers_are_left_out_if_one_rank_alone_may_have_changed_its_own():
    def body(rank, world):
        ours = Ours(ConvNet())
        if rank == 1:
            ours.forward_sync_buffers = False
            flip_bit(ours.module.norm.running_mean)
        assert ours.audit().buffers == 0

    run_ranks(body, 2)


def test_buffers_that_are_not_kept_equal_and_ignored_tensors_are_left_out():
    def body(rank, world):
        apart = Ours(ConvNet(), forward_sync_buffers=False)
        flip_bit(apart.module.norm.running_mean, bit=rank)
        assert apart.audit().buffers == 0
        module = ConvNet()
        Ours._set_params_and_buffers_to_ignore_for_model(module, ["head.bias", "norm.running_mean"])
        ours = Ours(module)
        flip_bit(ours.module.norm.running_mean, bit=rank)
        flip_bit(ours.module.head.bias, bit=rank)
        report = ours.audit()
        assert (report.parameters, report.buffers) == (5, 2)

    run_ranks(body, 2)


def test_a_buffer_that_a_rank_lacks_or_has_in_another_shape_is_named():
    def body(rank, world):
        ours = Ours(mlp())
        if rank == 1:
            ours.module.register_buffer("extra", torch.zeros(2))
        absent = found_by(ours.audit)
        if rank != 1:
            ours.module.register_buffer("extra", torch.zeros(2, 2))
        return absent, found_by(ours.audit)

    for absent, reshaped in run_ranks(body, 3):
        assert absent[1:] == reshaped[1:] == ("extra", [1])
        assert absent[0].endswith("absent on ranks 0 and 2, a buffer of torch.float32 [2] on rank 1")
        assert "a buffer of torch.float32 [2, 2] on ranks 0 and 2" in reshaped[0]


def test_buffers_are_left_out_under_a_hook_of_the_program():
    def body(rank, world):
        ours = Ours(ConvNet())
        ours._register_buffer_comm_hook(None, lambda state, tensors: None)
        step(ours, rank, 0, width=36)
        ours.sync_buffers()
        assert ours.audit().buffers == 0

    run_ranks(body, 2)


# ---- audit_every


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_audit_every_runs_in_the_same_iteration_on_all_ranks(transport):
    def body(rank, world):
        ours = Ours(mlp(), transport=transport, audit_every=3)
        forwards = 0
        try:
            for iteration in range(10):
                if iteration == 1 and rank == 1:
                    flip_bit(ours.module[0].bias)
                if rank == 0:  # an evaluation that the others do not join
                    with torch.no_grad():
                        ours(batch(rank, iteration, 5, 24))
                step(ours, rank, iteration)
                forwards += 1
        except ReplicasDiffer as error:
            return forwards, ours._reduction.engine.iteration, error.parameter, error.ranks
        return None

    assert run_ranks(body, 3) == [(3, 3, "0.bias", [1])] * 3


@pytest.mark.filterwarnings("ignore:training forwards since the last reduction differ")
def test_it_runs_once_an_iteration_however_many_forwards_there_are(monkeypatch):
    def body(rank, world):
        ours = Ours(mlp(), audit_every=2)
        audits = []
        run = ours._audit.run
        monkeypatch.setattr(ours._audit, "run", lambda ddp: audits.append(ddp._reduction.engine.iteration) or run(ddp))
        for iteration in range(6):
            with ours.no_sync():
                for micro in range(rank):  # ranks may differ in the number of forwards
                    ours(batch(rank, 10 * iteration + micro, 5, 24))
                ours(batch(rank, iteration, 5, 24)).sum().backward()
            step(ours, rank, iteration)
        return audits

    assert run_ranks(body, 2) == [[2, 4]] * 2


def test_an_evaluation_under_no_grad_neither_runs_it_nor_takes_its_place(monkeypatch):
    def body(rank, world):
        ours = Ours(mlp(), audit_every=1)
        audits = []
        monkeypatch.setattr(ours._audit, "run", lambda ddp: audits.append(ddp._reduction.engine.iteration))
        step(ours, rank, 0)
        with torch.no_grad():
            ours(batch(rank, 1, 5, 24))
        assert audits == []
        ours(batch(rank, 1, 5, 24))
        assert audits == [1]

    run_ranks(body, 1)


def test_it_waits_for_the_next_forward_where_checkpointing_runs_one_inside_backward(monkeypatch):
    def body(rank, world):
        ours = Ours(mlp(), audit_every=1)
        audits = []
        run = ours._audit.run
        monkeypatch.setattr(ours._audit, "run", lambda ddp: audits.append(ddp._reduction.engine.iteration) or run(ddp))
        for iteration in range(3):
            halves = batch(rank, iteration, 6, 24).requires_grad_().split(3)
            sum(checkpoint(ours, half, use_reentrant=True).sum() for half in halves).backward()
        return audits

    assert run_ranks(body, 2) == [[1, 2]] * 2


@pytest.mark.parametrize("uneven", [False, True])
def test_it_runs_among_uneven_inputs_while_nobody_has_joined_and_once_all_have(monkeypatch, uneven):
    def body(rank, world):
        ours = Ours(ConvNet(), audit_every=1)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        audits = []
        run = ours._audit.run
        monkeypatch.setattr(ours._audit, "run", lambda ddp: audits.append(ddp._reduction.engine.iteration) or run(ddp))
        with ours.join():
            for iteration in range(5 if rank == 1 or not uneven else 3):
                step(ours, rank, iteration, optimizer, width=36)
        assert ours.audit().parameters == 6
        step(ours, rank, 5, width=36)
        return audits

    assert run_ranks(body, 2) == [[1, 2, 5, 5] if uneven else [1, 2, 3, 4, 5, 5]] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks for one
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_it_runs_in_a_compiled_wrapper_too():
    def body(rank, world):
        ours = Ours(ConvNet(), audit_every=2)
        compiled = torch.compile(ours, backend="eager")
        for iteration in range(3):
            if iteration == 1 and rank == 0:
                flip_bit(ours.module.head.bias)
            if iteration == 2:
                return found_by(lambda: compiled(batch(rank, 2, 5, 36)))[1]
            compiled(batch(rank, iteration, 5, 36)).sum().backward()
        return None

    assert run_ranks(body, 2) == ["head.bias"] * 2


def test_buffers_are_compared_too_when_it_runs_by_itself(monkeypatch):
    def body(rank, world):
        ours = Ours(ConvNet(), audit_every=1)
        step(ours, rank, 0, width=36)
        if rank == 1:  # a broadcast that does not reach this rank
            nowhere = torch.empty(sum(b.nbytes for b in ours.module.buffers()), dtype=torch.uint8)
            monkeypatch.setattr(buffers, "broadcast_tensors", lambda _, comm, root: comm.broadcast(nowhere, root))
        return found_by(lambda: step(ours, rank, 1, width=36))[1]

    assert run_ranks(body, 2) == ["norm.running_mean"] * 2


@pytest.mark.parametrize("value", [True, 1.5, "3", None])
def test_an_interval_that_is_no_number_of_iterations_is_refused(value):
    with pytest.raises(TypeError, match=re.escape(f"audit_every is {value!r} ({type(value).__name__}), accepted is a")):
        Ours(mlp(), audit_every=value)


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match=r"audit_every is -1 \(int\), accepted is a whole number"):
        Ours(mlp(), audit_every=-1)


def test_intervals_that_differ_between_ranks_are_refused_on_all():
    def body(rank, world):
        with pytest.raises(ValueError, match=re.escape("by rank it is [0, 5]")):
            Ours(mlp(), audit_every=5 * rank)

    run_ranks(body, 2)


def test_in_another_process_group_and_in_a_copy_the_count_begins_anew():
    def body(rank, world):
        group = dist.new_group([0, 1])
        ours = Ours(mlp(), audit_every=1)
        step(ours, rank, 0)
        step(ours, rank, 1)
        copied = copy.deepcopy(ours)
        ours._update_process_group(group)
        for ddp in (ours, copied):
            assert ddp._audit._latest == 0
            step(ddp, rank, 0)
            if rank == 1:
                flip_bit(ddp.module[0].bias)
            assert found_by(lambda d=ddp: step(d, rank, 1))[1] == "0.bias"

    run_ranks(body, 2)


# ---- where it is called


def test_inside_a_backward_it_is_refused_and_the_iteration_fails_on_all_ranks():
    def body(rank, world):
        ours = Ours(mlp())
        out = ours(batch(rank, 0, 5, 24))
        if rank == 0:
            ours.module[0].bias.register_post_accumulate_grad_hook(lambda _: ours.audit())
            with pytest.raises(RuntimeError, match="inside backward"):
                out.sum().backward()
        else:
            with pytest.raises(gpucomm.StepFailed):
                out.sum().backward()
        ours.audit()

    run_ranks(body, 2)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ReplicasDiffer("text", "a.b", [1, 2])))
    assert (str(error), error.parameter, error.ranks) == ("text", "a.b", [1, 2])
    assert isinstance(error, gpucomm.CommError)
