"""The conformance suite of the transports: every one is held to the same results, through gpucomm.Communicator.

Contributions are a closed form of rank and index, so that an element in the wrong place or of the wrong rank is a wrong
result. Their values are integers that every order of additions gives exactly; 16-bit results are rounded once. Where
NCCL's results are others (it adds in the type itself), the values are such that they are the same: see `narrow`.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transports import each_transport, on_gpu

from gpucomm import Communicator

WORLDS = (1, 2, 3) if on_gpu else (1, 2, 3, 4)  # the stand-in's host waits where a GPU would
OPS = ("sum", "avg", "min", "max", "prod")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
# Where shared memory goes from one way of carrying data to another (csrc/transport/shm_layout.h).
INLINE_BYTES = 80
SLOT_BYTES = 64 * 1024
STAGING_BYTES = 128 * 1024  # one round, shared by the other ranks
STAGING_ROUNDS = 4

each_world = pytest.mark.parametrize("world", WORLDS)


def contribution(rank: int, numel: int, dtype: torch.dtype, op: str, narrow: bool = False) -> torch.Tensor:
    """What rank brings, as int64. Unique per rank and index up to a long period that no internal size divides.

    narrow: the partial sums and products of eight ranks are exact in 16 bits, so that it does not matter how often they
    are rounded.
    """
    index = torch.arange(numel, dtype=torch.int64)
    if op == "prod":
        return 1 + (index * 7 + rank * 5 + index // 11) % (2 if narrow else 3)
    if narrow:
        return (index * 37 + rank * 11 + index // 31) % 31 - 15
    period = 251 if dtype in (torch.float16, torch.bfloat16, torch.uint8) else 65521
    value = (index * 37 + rank * 101 + index // period) % period
    return value if dtype == torch.uint8 else value - period // 2


def contributions(
    ranks: list[int], numel: int, dtype: torch.dtype, op: str, narrow: bool = False
) -> list[torch.Tensor]:
    """Of all ranks, in dtype; for an average of floats, multiples of their number, so that the mean is exact."""
    values = [contribution(rank, numel, dtype, op, narrow) for rank in ranks]
    if op == "avg" and dtype.is_floating_point:
        values = [(value % (4 if narrow else 32)) * len(ranks) for value in values]
    return [value.to(dtype) for value in values]


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """The definition of each op, computed in 64 bits and rounded (or wrapped) once."""
    dtype = tensors[0].dtype
    wide = torch.stack([t.double() if dtype.is_floating_point else t.long() for t in tensors])
    if op == "sum":
        result = wide.sum(0)
    elif op == "avg":
        total = wide.sum(0)
        result = (
            total / len(tensors) if dtype.is_floating_point else torch.div(total, len(tensors), rounding_mode="trunc")
        )
    elif op == "prod":
        result = wide.prod(0)
    else:
        result = wide.amin(0) if op == "min" else wide.amax(0)
    return result.to(dtype)


class Case:
    """A communicator and who contributes to it: with loopback, this rank alone, as often as it has ranks."""

    def __init__(self, comm: Communicator, me: int, members: list[int]) -> None:
        self.comm = comm
        self.me = me
        self.loopback = comm.transport == "loopback"
        self.nccl = comm.transport == "nccl"
        self.members = [me] * comm.world_size if self.loopback else members

    def contributions(self, numel: int, dtype: torch.dtype, op: str) -> list[torch.Tensor]:
        return contributions(self.members, numel, dtype, op, self.nccl and dtype.itemsize == 2)

    def place(self, tensor: torch.Tensor, memory: str) -> torch.Tensor:
        """A copy of tensor in memory of the kind named."""
        shape, dtype = tensor.shape, tensor.dtype
        if memory == "ours" or (memory == "mixed" and self.me % 2 == 0):
            copy = self.comm.empty(shape, dtype)
        elif memory == "slice":  # at an odd offset, of a length that is no multiple of a line
            copy = self.comm.empty(tensor.numel() + 5, dtype)[3 : 3 + tensor.numel()].view(shape)
        else:
            copy = torch.empty(shape, dtype=dtype)
        return copy.copy_(tensor)

    def check(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Equal bit for bit (no contribution is a negative zero or a NaN)."""
        if torch.equal(got, expected):
            return
        wrong = (got != expected).nonzero().flatten()
        first = int(wrong[0])
        raise AssertionError(
            f"{what}, {self.comm.transport}, rank {self.me} of {self.members}: {len(wrong)} of {got.numel()} elements "
            f"are wrong, the first at {first}: {got[first]} instead of {expected[first]}"
        )

    def all_reduce(self, numel: int, dtype: torch.dtype, op: str, memory: str) -> None:
        parts = self.contributions(numel, dtype, op)
        x = self.place(parts[self.members.index(self.me)], memory)
        assert self.comm.all_reduce(x, op) is x
        self.check(f"all_reduce {op} of {numel} {dtype} ({memory})", x, reduced(parts, op))

    def reduce_scatter(self, numel: int, dtype: torch.dtype, op: str, memory: str) -> None:
        parts = self.contributions(numel * self.comm.world_size, dtype, op)
        mine = parts[self.members.index(self.me)]
        source = self.place(mine, memory)
        output = self.place(torch.zeros(numel, dtype=dtype), "ordinary" if memory == "mixed" else memory)
        assert self.comm.reduce_scatter(output, source, op) is output
        expected = reduced(parts, op)[self.comm.rank * numel : (self.comm.rank + 1) * numel]
        what = f"reduce_scatter {op} of {numel} {dtype} ({memory})"
        self.check(what, output, expected)
        self.check(what + ": its input", source, mine)

    def all_gather(self, numel: int, dtype: torch.dtype, memory: str) -> None:
        parts = contributions(self.members, numel, dtype, "sum")
        mine = parts[self.members.index(self.me)]
        source = self.place(mine, memory)
        output = self.place(torch.zeros(numel * self.comm.world_size, dtype=dtype), memory)
        assert self.comm.all_gather(output, source) is output
        what = f"all_gather of {numel} {dtype} ({memory})"
        self.check(what, output, torch.cat(parts))
        self.check(what + ": its input", source, mine)

    def broadcast(self, numel: int, dtype: torch.dtype, root: int, memory: str) -> None:
        parts = contributions(self.members, numel, dtype, "sum")
        x = self.place(parts[self.members.index(self.me)], memory)
        assert self.comm.broadcast(x, root) is x
        self.check(f"broadcast from {root} of {numel} {dtype} ({memory})", x, parts[root])


def on_ranks(body, world: int, transport: str, *args, timeout_s: float = 120) -> list:
    """body(case, *args) on every rank with one communicator."""

    def rank_body(rank, size):
        with Communicator(transport=transport) as comm:
            assert comm.transport == transport
            assert comm.world_size == size
            return body(Case(comm, rank, list(range(size))), *args)

    return run_ranks(rank_body, world, timeout_s=timeout_s)


def sizes_of(dtype: torch.dtype) -> list[int]:
    one_past_each = [limit // dtype.itemsize + 1 for limit in (INLINE_BYTES, SLOT_BYTES)]
    return [0, 1, 7, INLINE_BYTES // dtype.itemsize, 1000, *one_past_each]


def reductions_of(case: Case) -> list[tuple[torch.dtype, str]]:
    """What can be reduced how; by NCCL no average of bytes."""
    return [pair for pair in itertools.product(DTYPES, OPS) if not (case.nccl and pair == (torch.uint8, "avg"))]


MEMORIES = ("ours", "ordinary", "mixed", "slice")


@each_transport
@each_world
def test_reductions_give_the_result_of_their_definition(transport, world):
    def body(case):
        memories = itertools.cycle(MEMORIES)
        for dtype, op in reductions_of(case):
            for numel in sizes_of(dtype):
                case.all_reduce(numel, dtype, op, next(memories))
                case.reduce_scatter(numel, dtype, op, next(memories))
            next(memories)  # so that every size meets every kind of memory

    on_ranks(body, world, transport)


@each_transport
@each_world
def test_copies_bring_the_bits_of_every_rank(transport, world):
    def body(case):
        for dtype, memory in itertools.product(DTYPES, MEMORIES):
            for numel in sizes_of(dtype):
                case.all_gather(numel, dtype, memory)
                case.broadcast(numel, dtype, numel % case.comm.world_size, memory)
        for root in range(case.comm.world_size):
            case.broadcast(1000, torch.float32, root, "mixed")

    on_ranks(body, world, transport)


@each_transport
@pytest.mark.parametrize("world", [2, 3, 8])
def test_arrays_of_many_segments(transport, world):
    def body(case):
        size = case.comm.world_size
        piece = min(max(STAGING_BYTES // (size - 1) // 4096 * 4096, 8192), 65536)
        for dtype, op, rounds, memory in (
            (torch.float32, "sum", STAGING_ROUNDS + 1, "ordinary"),
            (torch.float32, "avg", STAGING_ROUNDS + 1, "mixed"),
            (torch.bfloat16, "sum", 1, "ordinary"),
            (torch.bfloat16, "avg", 1, "slice"),
            (torch.uint8, "max", 1, "ordinary"),
        ):
            numel = rounds * piece // dtype.itemsize + 1
            case.all_reduce(numel * size, dtype, op, memory)
            case.reduce_scatter(numel, dtype, op, memory)
            case.all_gather(numel, dtype, memory)
            case.broadcast(numel, dtype, size - 1, memory)

    on_ranks(body, world, transport)


@each_transport
def test_eight_ranks(transport):
    def body(case):
        memories = itertools.cycle(MEMORIES)
        for dtype, op in reductions_of(case):
            for numel in (1, 7, 1000):
                case.all_reduce(numel, dtype, op, next(memories))
        for numel in (0, 7, 1000):
            case.reduce_scatter(numel, torch.float32, "sum", "ours")
            case.all_gather(numel, torch.int64, "ordinary")
            case.broadcast(numel, torch.uint8, 5, "mixed")

    on_ranks(body, 8, transport)


def noise(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sum depends on the order of additions."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@each_transport
@each_world
def test_results_are_bitwise_equal_between_ranks_runs_and_kinds_of_memory(transport, world):
    sizes = (1, 7, 1000, 20000, 50000)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def body(case):
        found = []
        for numel, dtype in itertools.product(sizes, floats):
            runs = []
            for memory in (*MEMORIES, "ours"):
                x = case.place(noise(0 if case.loopback else case.me, numel, dtype), memory)
                runs.append(case.comm.all_reduce(x, "avg").view(torch.uint8).clone())
            assert all(torch.equal(run, runs[0]) for run in runs), (numel, dtype)
            found.append(runs[0])
        return torch.cat(found)

    results = on_ranks(body, world, transport) + on_ranks(body, world, transport)
    assert all(torch.equal(result, results[0]) for result in results)


@each_transport
@each_world
def test_floats_are_added_in_a_precision_that_loses_little(transport, world):
    def body(case):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            parts = [noise(rank, 1000, dtype) for rank in case.members]
            x = case.comm.all_reduce(case.place(parts[case.members.index(case.me)], "ours"))
            exact = torch.stack(parts).double().sum(0)
            # 16 bits: accumulated in fp32, so no error but that of the last rounding, which may fall to either side.
            # By NCCL every sum may be rounded.
            step = torch.finfo(dtype).eps * torch.stack(parts).double().abs().sum(0)
            once = dtype.itemsize == 2 and not case.nccl
            limit = step * (0.5001 if once else case.comm.world_size)
            assert ((x.double() - exact).abs() <= limit).all(), dtype

    on_ranks(body, world, transport)


@each_transport
def test_a_nan_of_any_rank_is_the_minimum_and_the_maximum(transport):
    def body(case):
        size = case.comm.world_size
        for dtype, op, sign in itertools.product(DTYPES[:4], ("min", "max"), (1.0, -1.0)):
            x = case.place(torch.tensor([1.0, 2.0, 3.0]).to(dtype), "ours")
            x[case.me % 3] = torch.tensor(float("nan")).copysign(torch.tensor(sign))
            case.comm.all_reduce(x, op)
            expected = [i in {member % 3 for member in case.members} for i in range(3)]
            assert x.isnan().tolist() == expected, (dtype, op)
            whole = torch.arange(float(3 * size)).to(dtype)
            whole[case.me % 3] = float("nan")
            part = torch.empty(3, dtype=dtype)
            case.comm.reduce_scatter(part, whole, op)
            assert part.isnan().tolist() == (expected if case.comm.rank == 0 else [False] * 3), (dtype, op)

    on_ranks(body, 2, transport)


@each_transport
def test_minimum_and_maximum_of_every_kind_of_number(transport):
    values = torch.tensor([float("-inf"), -3.5, -1.0, -1e-40, 0.0, 1e-40, 2.0, 7.0, float("inf")])
    pairs = torch.cartesian_prod(values, values)

    def body(case):
        for dtype, op in itertools.product((torch.float32, torch.float64, torch.bfloat16), ("min", "max")):
            mine = [pairs[:, rank % 2].to(dtype) for rank in case.members]
            x = mine[case.members.index(case.me)].clone()
            case.comm.all_reduce(x, op)
            case.check(f"{op} {dtype}", x, getattr(torch.stack(mine), f"a{op}")(0))

    on_ranks(body, 2, transport)


@each_transport
@each_world
def test_a_barrier_is_passed_after_the_last_rank_came(transport, world):
    def body(rank, size):
        store = dist.distributed_c10d._get_default_store()
        with Communicator(transport=transport) as comm:
            for turn in range(20):
                came = store.add(f"came/{turn}", 1)
                comm.barrier()
                after = store.add(f"came/{turn}", 0)
                assert after == size or transport == "loopback", (turn, came, after)

    run_ranks(body, world)


@each_transport
@each_world
def test_many_in_flight_are_waited_for_in_any_order(transport, world):
    def body(case):
        size = case.comm.world_size
        started = []
        for i in range(100):  # more than shared memory describes at once
            numel = (3, 1000, 40000)[i % 3]
            parts = contributions([member + i for member in case.members], numel, torch.float32, "sum")
            mine = case.place(parts[case.members.index(case.me)], MEMORIES[i % 4])
            if i % 5 == 4:
                output = torch.empty(numel * size)
                started.append((case.comm.all_gather(output, mine, async_op=True), output, torch.cat(parts)))
            elif i % 5 == 3:
                work = case.comm.broadcast(mine, i % size, async_op=True)
                started.append((work, mine, parts[i % size]))
            else:
                started.append((case.comm.all_reduce(mine, async_op=True), mine, reduced(parts, "sum")))
        order = torch.randperm(len(started), generator=torch.Generator().manual_seed(case.me)).tolist()
        for position in order:
            work, result, expected = started[position]
            work.wait()
            assert work.done() or case.nccl  # there the program's stream waits, and not the host
            case.check(f"asynchronous collective {position}", result, expected)
        for work, _, _ in started:
            work.wait()  # again: nothing happens

    on_ranks(body, world, transport)


@each_transport
@pytest.mark.parametrize("world", [2, 3])
def test_done_alone_brings_a_collective_to_its_end(transport, world):
    def body(case):
        for numel in (1, 1000, 100000):
            parts = contributions(case.members, numel, torch.float32, "sum")
            x = case.place(parts[case.members.index(case.me)], "mixed")
            work = case.comm.all_reduce(x, async_op=True)
            while not work.done():
                pass
            case.check("polled all_reduce", x, reduced(parts, "sum"))

    on_ranks(body, world, transport)


@each_transport
@each_world
def test_small_and_large_collectives_alternate(transport, world):
    def body(case):
        for i in range(40):
            numel = (1, 30000, 7, 100000, 0)[i % 5]
            case.all_reduce(numel, torch.float32, "sum", MEMORIES[i % 4])
            if i % 4 == 0:
                case.comm.barrier()
            case.all_gather(3, torch.int64, "ordinary")

    on_ranks(body, world, transport)


@each_transport
@each_world
def test_the_same_memory_is_reduced_many_times(transport, world):
    def body(case):
        for numel, memory in itertools.product((1, 100, 20000), MEMORIES):
            x = case.place(torch.zeros(numel), memory)
            for turn in range(20):
                x.copy_(contribution(case.me + turn, numel, torch.float32, "sum"))
                case.comm.all_reduce(x)
                expected = [contribution(member + turn, numel, torch.float32, "sum") for member in case.members]
                case.check(f"round {turn}", x, torch.stack(expected).sum(0).float())

    on_ranks(body, world, transport)


@each_transport
def test_input_may_be_a_part_of_output(transport):
    def body(case):
        size, rank = case.comm.world_size, case.comm.rank
        for numel in (3, 1000, 100000):
            parts = contributions(case.members, numel, torch.float32, "sum")
            for memory in ("ours", "ordinary"):
                output = case.place(torch.zeros(size * numel), memory)
                mine = output[rank * numel : (rank + 1) * numel]
                mine.copy_(parts[case.members.index(case.me)])
                case.comm.all_gather(output, mine)
                case.check(f"all_gather in place ({memory})", output, torch.cat(parts))

                wholes = contributions(case.members, size * numel, torch.float32, "sum")
                whole = case.place(wholes[case.members.index(case.me)], memory)
                part = whole[rank * numel : (rank + 1) * numel]
                case.comm.reduce_scatter(part, whole)
                expected = reduced(wholes, "sum")[rank * numel : (rank + 1) * numel]
                case.check(f"reduce_scatter in place ({memory})", part, expected)

    on_ranks(body, 3, transport)


@each_transport
@pytest.mark.parametrize("numel", [3, 100000])
def test_other_overlaps_of_input_and_output_are_refused_before_anything_starts(transport, numel):
    def body(case):
        comm, size, rank = case.comm, case.comm.world_size, case.comm.rank
        memory = torch.arange(float(3 * size * numel))
        other = (rank + 1) % size
        refused = {
            "another's part": (size * numel, other * numel),
            "across parts": (size * numel, rank * numel + 1),
            "around the begin": (0, -1),
            "around the end": (0, size * numel - 1),
        }
        for what, (offset, at) in refused.items():
            start = numel + offset
            whole = memory[start : start + size * numel]
            small = memory[start + at : start + at + numel]
            before = memory.clone()
            if rank == 0:  # the others' next operations meet this rank's next ones
                with pytest.raises(ValueError, match=f"all_gather: input and output overlap.*part {rank} of output"):
                    comm.all_gather(whole, small)
                with pytest.raises(ValueError, match=f"reduce_scatter: input and output overlap.*part {rank} of input"):
                    comm.reduce_scatter(small, whole, async_op=True)
            case.check(what, memory, before)
            x = torch.ones(5)
            comm.all_reduce(x)
            case.check("what comes next", x, torch.full((5,), float(size)))
        beside = memory[: size * numel], memory[size * numel : (size + 1) * numel]
        comm.all_gather(*beside)

    on_ranks(body, 2, transport)


@each_transport
def test_a_group_of_some_ranks(transport):
    def body(rank, world):
        group = dist.new_group([0, 2])
        if rank == 1:
            return
        with Communicator(group, transport=transport) as comm:
            assert comm.world_size == 2
            assert comm.rank == (0 if transport == "loopback" else rank // 2)
            case = Case(comm, rank, [0, 2])
            for numel in (1, 1000, 30000):
                for memory in MEMORIES:
                    case.all_reduce(numel, torch.float32, "sum", memory)
                    case.broadcast(numel, torch.int32, 1, memory)
                case.all_gather(numel, torch.bfloat16, "ordinary")
                case.reduce_scatter(numel, torch.int64, "max", "ordinary")

    run_ranks(body, 3)


@each_transport
def test_communicators_do_not_disturb_each_other(transport):
    def body(rank, world):
        members = list(range(world))
        with Communicator(transport=transport) as one, Communicator(transport=transport) as other:
            first, second = Case(one, rank, members), Case(other, rank, members)
            for i in range(20):
                mine = first.place(contribution(rank, 30000, torch.float32, "sum").float(), "ours")
                pending = one.all_reduce(mine, async_op=True)
                second.all_reduce(30000 if i % 2 else 5, torch.float32, "sum", MEMORIES[i % 4])
                pending.wait()
                parts = [contribution(member, 30000, torch.float32, "sum").float() for member in first.members]
                first.check("while another communicator worked", mine, reduced(parts, "sum"))
            one.close()
            second.all_reduce(1000, torch.float32, "sum", "ours")
        with Communicator(transport=transport) as again:
            Case(again, rank, members).all_reduce(1000, torch.float32, "sum", "ours")

    run_ranks(body, 3)


@pytest.mark.skipif(not on_gpu, reason="NCCL's")
def test_an_average_of_bytes_is_refused_by_nccl_which_adds_them_in_8_bits():
    def body(case):
        comm, x, part = case.comm, torch.full((6,), 200, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
        for start in (lambda: comm.all_reduce(x, "avg"), lambda: comm.reduce_scatter(part, x, "avg")):
            with pytest.raises(ValueError, match="uint8: NCCL adds bytes in 8 bits"):
                start()
        case.check("what was refused", x, torch.full((6,), 200, dtype=torch.uint8))
        case.all_reduce(5, torch.uint8, "sum", "ordinary")

    on_ranks(body, 2, "nccl")
