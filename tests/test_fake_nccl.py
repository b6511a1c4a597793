"""The stand-in for NCCL: are its collectives those of NCCL, in the order of streams, on every rank alike?"""

import contextlib
import ctypes

import pytest
import torch
from fake_cuda.nccl import OPS, TYPES, VERSIONS, NcclError, device_tensor, on_device
from fake_cuda.program import Program
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fake_cuda")  # built before the ranks are forked

WORLDS = [1, 2, 3, 4]
COUNTS = [1, 7, 1000]


def values_of(rank, numel, dtype):
    """Small whole numbers, exact in every type."""
    return torch.tensor([(5 * i + 7 * rank) % 5 + 1 for i in range(numel)], dtype=dtype)


def reduced(op, world, numel, dtype):
    rows = torch.stack([values_of(rank, numel, torch.float64) for rank in range(world)])
    result = {
        "sum": lambda: rows.sum(0),
        "prod": lambda: rows.prod(0),
        "min": lambda: rows.min(0).values,
        "max": lambda: rows.max(0).values,
        "avg": lambda: rows.sum(0) / world,
    }[op]()
    return (result if dtype.is_floating_point else result.trunc().to(torch.int64)).to(dtype)


def assert_reduced(got, op, world, numel, dtype, part=slice(None)):
    expected = reduced(op, world, numel, dtype)[part]
    if op == "avg" and dtype.is_floating_point:  # 1/N is rounded first
        assert torch.allclose(got.double(), expected.double(), rtol=world * torch.finfo(dtype).eps)
    else:
        assert torch.equal(got, expected)


def run(world, body, *args, **options):
    """body(rank, *args) on every rank; returns what each returns."""

    def on_rank(rank, world):
        with on_device(rank, world, **options) as running:
            return body(running, *args)

    return run_ranks(on_rank, world)


# ---- results


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_of_every_type_and_operation(world):
    def body(it):
        comm = it.init()
        for dtype in TYPES:
            for op in OPS:
                for numel in COUNTS:
                    x = it.tensor(values_of(it.rank, numel, dtype))
                    out = it.tensor(torch.zeros_like(x))
                    it.nccl.all_reduce(x, out, op, comm, it.stream)
                    it.nccl.all_reduce(x, x, op, comm, it.stream)
                    assert it.control.drain()
                    assert_reduced(out, op, world, numel, dtype)
                    assert torch.equal(x, out)
        it.nccl.call("ncclCommDestroy", comm)

    run(world, body)


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_gives_each_rank_its_part(world):
    def body(it):
        comm = it.init()
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for numel in COUNTS:
                x = it.tensor(values_of(it.rank, world * numel, dtype))
                out = it.tensor(torch.zeros(numel, dtype=dtype))
                part = slice(it.rank * numel, (it.rank + 1) * numel)
                it.nccl.reduce_scatter(x, out, "sum", comm, it.stream)
                it.nccl.reduce_scatter(x, x[part], "sum", comm, it.stream)
                assert it.control.drain()
                assert_reduced(out, "sum", world, world * numel, dtype, part)
                assert torch.equal(x[part], out)
        it.nccl.call("ncclCommDestroy", comm)

    run(world, body)


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_and_broadcast_move_bytes(world):
    def body(it):
        comm = it.init()
        for dtype in (torch.uint8, torch.float16, torch.float64):
            for numel in COUNTS:
                x = it.tensor(values_of(it.rank, numel, dtype))
                gathered, in_place = (it.tensor(torch.zeros(world * numel, dtype=dtype)) for _ in range(2))
                own = in_place[it.rank * numel : (it.rank + 1) * numel].copy_(x)
                out = it.tensor(torch.zeros_like(x))
                it.nccl.all_gather(x, gathered, comm, it.stream)
                it.nccl.all_gather(own, in_place, comm, it.stream)
                it.nccl.broadcast(x, out, world - 1, comm, it.stream)
                it.nccl.broadcast(x, x, 0, comm, it.stream)
                assert it.control.drain()
                everything = torch.cat([values_of(rank, numel, dtype) for rank in range(world)])
                assert torch.equal(gathered, everything)
                assert torch.equal(in_place, everything)
                assert torch.equal(out, values_of(world - 1, numel, dtype))
                assert torch.equal(x, values_of(0, numel, dtype))
        it.nccl.call("ncclCommDestroy", comm)

    run(world, body)


def test_every_rank_gets_the_same_bits():
    def body(it):
        comm = it.init()
        torch.manual_seed(it.rank)
        results = []
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = it.tensor(torch.randn(1001).to(dtype))
            it.nccl.all_reduce(x, x, "sum", comm, it.stream)
            assert it.control.drain()
            results.append(x.view(torch.uint8).tolist())
        it.nccl.call("ncclCommDestroy", comm)
        return results

    first, *others = run(4, body)
    assert all(other == first for other in others)


def sum_of_256_and_ones(it):
    """In bfloat16 256 + 1 is 256, but 256 + 2 is 258."""
    comm = it.init()
    x = it.tensor(torch.full((3,), 256.0 if it.rank == 0 else 1.0, dtype=torch.bfloat16))
    it.nccl.all_reduce(x, x, "sum", comm, it.stream)
    assert it.control.drain()
    it.nccl.call("ncclCommDestroy", comm)
    return x.tolist()


def test_sums_are_rounded_at_each_step_of_a_ring_that_begins_elsewhere_for_each_part():
    # Part p begins at rank p + 1: (1 + 1) + 256, (1 + 256) + 1, (256 + 1) + 1.
    assert run(3, sum_of_256_and_ones) == [[258.0, 256.0, 256.0]] * 3


def test_another_ring_gives_other_sums():
    assert run(3, sum_of_256_and_ones, script="ring seed=1") == [[256.0, 256.0, 258.0]] * 3


def test_sums_of_16_bit_types_may_be_accumulated_in_fp32():
    assert run(3, sum_of_256_and_ones, script="fp32_sums") == [[258.0] * 3] * 3


def test_avg_multiplies_by_the_rounded_reciprocal_first():
    values = torch.arange(1, 200).to(torch.bfloat16)

    def body(it):
        comm = it.init()
        x = it.tensor(values)
        it.nccl.all_reduce(x, x, "avg", comm, it.stream)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        return x.tolist()

    part = values * torch.tensor(1 / 3, dtype=torch.bfloat16)
    expected = part + part + part
    assert run(3, body) == [expected.tolist()] * 3
    assert not torch.equal(expected, values)


def test_integers_wrap_around():
    def body(it):
        comm = it.init()
        x = it.tensor(torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32))
        it.nccl.all_reduce(x, x, "sum", comm, it.stream)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        return x.tolist()

    assert run(2, body) == [[-2, 0]] * 2


# ---- streams


def test_nothing_runs_when_it_is_launched_and_outputs_are_garbage_until_it_is_complete():
    def body(it):
        comm = it.init()
        x = it.tensor(torch.ones(4))
        out = it.tensor(torch.zeros(4))
        if it.rank == 0:
            it.nccl.all_reduce(x, out, "sum", comm, it.stream)
            assert out.tolist() == [0.0] * 4
            while not out.isnan().all():  # published: the peer may read it
                it.program.is_idle(it.stream)
            assert not it.program.is_idle(it.stream)
            torch.distributed.barrier()
        else:
            torch.distributed.barrier()
            it.nccl.all_reduce(x, out, "sum", comm, it.stream)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        return out.tolist()

    assert run(2, body) == [[2.0] * 4] * 2


def test_a_collective_that_is_not_ordered_after_its_input_is_a_race():
    def body(it):
        comm = it.init()
        x = it.tensor(torch.zeros(64))
        it.program.fill(x.data_ptr(), 64, 1.0, it.program.stream("producer"))
        it.nccl.all_reduce(x, x, "sum", comm, it.stream)
        assert it.control.drain()
        races = it.control.reports("race")
        it.control.clear_reports()
        it.nccl.call("ncclCommDestroy", comm)
        return len(races)

    assert all(run(2, body))


def test_the_collectives_of_one_communicator_run_in_turn_on_any_streams():
    def body(it):
        comm = it.init()
        tensors = [it.tensor(torch.full((3,), float(i))) for i in range(6)]
        for i, x in enumerate(tensors):
            it.nccl.all_reduce(x, x, "sum", comm, [it.stream, it.program.stream("another")][i % 2])
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        return [x[0].item() for x in tensors]

    assert run(2, body) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def test_a_group_is_one_launch():
    def body(it):
        comm = it.init()
        x, header = it.tensor(torch.ones(100)), it.tensor(torch.tensor([1, 2]))
        launched = it.nccl.library.fake_nccl_launched()
        with it.nccl.group():
            it.nccl.all_reduce(x, x, "sum", comm, it.stream)
            with it.nccl.group():
                it.nccl.all_reduce(header, header, "max", comm, it.stream)
        assert it.nccl.library.fake_nccl_launched() == launched + 1
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        return x[0].item(), header.tolist()

    assert run(2, body) == [(2.0, [1, 2])] * 2


def test_one_thread_drives_several_ranks_in_groups(fake_cuda):
    world = 3
    with on_device(0, world) as it, contextlib.ExitStack() as devices:
        programs = [devices.enter_context(Program(it.control, device)) for device in range(world)]
        unique_id = it.nccl.unique_id()
        comms = [ctypes.c_void_p() for _ in programs]
        with it.nccl.group():
            for rank, program in enumerate(programs):
                with program:
                    it.nccl.call("ncclCommInitRankConfig", ctypes.byref(comms[rank]), world, unique_id, rank, None)
        tensors = []
        with it.nccl.group():
            for rank, program in enumerate(programs):
                with program:
                    tensors.append(device_tensor(program.allocate(5), 5, torch.float32).fill_(rank + 1))
                    it.nccl.all_reduce(tensors[rank], tensors[rank], "sum", comms[rank], program.stream())
        assert it.control.drain()
        assert [x.tolist() for x in tensors] == [[6.0] * 5] * world
        for comm in comms:
            it.nccl.call("ncclCommDestroy", comm)


def test_an_empty_collective_launches_nothing():
    def body(it):
        comm = it.init()
        x = it.tensor(torch.ones(4))[:0]
        launched = it.nccl.library.fake_nccl_launched()
        it.nccl.all_reduce(x, x, "sum", comm, it.stream)
        assert it.nccl.library.fake_nccl_launched() == launched
        it.nccl.call("ncclCommDestroy", comm)

    run(1, body)


# ---- versions


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_functions_of_its_time(version):
    with on_device(0, 1, version=version) as it:
        since = {
            "ncclCommSplit": 21800,
            "ncclMemAlloc": 21900,
            "ncclCommRegister": 21900,
            "ncclCommWindowRegister": 22703,
            "ncclCommShrink": 22703,
            "ncclCommRevoke": 22807,
        }
        assert {symbol: it.nccl.has(symbol) for symbol in since} == {s: v <= version for s, v in since.items()}
        comm = it.init()
        x = it.tensor(torch.ones(3))
        it.nccl.all_reduce(x, x, "sum", comm, it.stream)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)


def test_ranks_of_different_versions_do_not_come_together():
    def body(rank, world):
        with on_device(rank, world, version=VERSIONS[rank]) as it, pytest.raises(NcclError) as caught:
            it.init()
        return caught.value.result, caught.value.text

    results = run_ranks(body, 2)
    assert {result for result, _ in results} == {5}
    assert all("Mismatched NCCL version" in text for _, text in results)


# ---- nothing stays behind


def test_ranks_leave_nothing_behind(nothing_is_left_behind):
    run(2, sum_of_256_and_ones)
