"""Communicator: what it takes, what it refuses and how, and how long things live."""

import functools
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expect import raises
from footprint import mapped_memfds
from ranks import run_ranks
from transports import each_transport

from gpucomm import Communicator, DistributedDataParallel


class OnlyDlpack:
    """An array that can do nothing but export itself."""

    def __init__(self, tensor, versioned=False):
        self.tensor = tensor
        self.versioned = versioned

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options) if self.versioned else self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@each_transport
def test_arrays_of_every_library_are_reduced_in_place(transport):
    def body(rank, world):
        with Communicator(transport=transport) as comm:
            for dtype in (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8):
                x = np.full((2, 3), 3, dtype)
                assert comm.all_reduce(x) is x
                assert (x == 6).all(), dtype
            raw = bytearray([1, 2, 3])
            comm.all_reduce(raw)
            assert raw == bytes([2, 4, 6])
            comm.all_reduce(memoryview(raw)[1:])
            assert raw == bytes([2, 8, 12])
            tensor = torch.ones(5)
            exported = OnlyDlpack(tensor)
            assert comm.all_reduce(exported) is exported
            assert (tensor == 2).all()
            parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            comm.all_reduce(parameter)
            assert (parameter == 2).all()
            attached = torch.ones(3, requires_grad=True)
            comm.all_reduce(attached)
            assert (attached == 2).all()
            for dtype in (torch.complex64, torch.complex128):
                x = torch.full((3,), 1 + 2j, dtype=dtype)
                comm.all_reduce(x)
                assert (x == 2 + 4j).all()
            x = np.full(3, 1 + 2j)
            comm.all_reduce(x)
            assert (x == 2 + 4j).all()
            for op in ("prod", "min", "max"):  # meaningless on pairs
                with pytest.raises(ValueError, match=f"op is '{op}', complex arrays take 'sum' and 'avg'"):
                    comm.all_reduce(x, op)
                with pytest.raises(ValueError, match="complex arrays take"):
                    comm.reduce_scatter(np.zeros(1, complex), np.zeros(world, complex), op)
            with pytest.raises(TypeError, match="output is complex of float64, input is float64"):
                comm.all_gather(np.zeros(world, complex), np.zeros(2))
            scalar = torch.tensor(2.5)
            comm.all_reduce(scalar)
            assert scalar == 5
            scalar = np.array(2.5)
            comm.all_reduce(scalar)
            assert scalar == 5
            x = torch.ones(4, 1, 5)[:, :, :].transpose(0, 1)  # contiguous but for a dimension of size 1
            comm.all_reduce(x)
            assert (x == 2).all()
            for empty in (torch.empty(0), torch.empty(3, 0), np.empty(0, np.float32), bytearray()):
                comm.all_reduce(empty)

    run_ranks(body, 2)


def test_what_one_library_has_is_gathered_into_an_array_of_another():
    def body(rank, world):
        with Communicator() as comm:
            gathered = np.zeros(2 * world, np.int32)
            comm.all_gather(gathered, torch.tensor([7, 8], dtype=torch.int32))
            assert gathered.tolist() == [7, 8] * world

    run_ranks(body, 2)


class OldDlpack(OnlyDlpack):
    """A producer from before the versioned form, which does not know the argument that asks for it."""

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__()


def test_an_input_may_be_read_only_and_every_form_of_dlpack_is_read():
    frozen = np.full(3, 5, np.float32)
    frozen.flags.writeable = False

    def body(rank, world):
        with Communicator() as comm:
            for source in (frozen, OnlyDlpack(frozen, versioned=True), frozen.tobytes()):
                raw = isinstance(source, bytes)
                output = torch.zeros(world * (12 if raw else 3), dtype=torch.uint8 if raw else torch.float32)
                comm.all_gather(output, source)
                assert output.numpy().tobytes() == frozen.tobytes() * world
            for kind in (OldDlpack, OnlyDlpack, functools.partial(OnlyDlpack, versioned=True)):
                x = torch.ones(4)
                comm.all_reduce(kind(x))
                assert (x == world).all()

    run_ranks(body, 2)


def with_communicator(transport, body, world=1):
    def rank_body(rank, size):
        with Communicator(transport=transport) as comm:
            body(comm)
            x = torch.ones(3)
            comm.all_reduce(x)  # a refused argument leaves the communicator as it was
            assert (x == size).all()

    run_ranks(rank_body, world)


@each_transport
def test_what_is_refused_is_named(transport):
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    frozen_export = OnlyDlpack(frozen, versioned=True)

    def body(comm):
        size = comm.world_size
        x = torch.ones(3)
        raises(ValueError, "contiguous", lambda: comm.all_reduce(torch.ones(4, 4)[:, 1]))
        raises(ValueError, "contiguous", lambda: comm.all_reduce(torch.ones(4, 3).t()))
        raises(ValueError, "contiguous", lambda: comm.all_reduce(np.ones(8)[::2]))
        raises(ValueError, "contiguous", lambda: comm.all_reduce(np.ones(8)[::-1]))
        raises(ValueError, "^all_reduce: x is not contiguous", lambda: comm.all_reduce(torch.ones(4, 4)[:, 1]))
        raises(ValueError, "^broadcast: x is not contiguous", lambda: comm.broadcast(torch.ones(4, 4)[:, 1]))
        raises(ValueError, "^all_gather: input is not contig", lambda: comm.all_gather(x, torch.ones(4, 4)[:, 1]))
        raises(ValueError, "^reduce_scatter: output is not c", lambda: comm.reduce_scatter(torch.ones(4, 4)[:, 1], x))
        raises(ValueError, r"^all_reduce: x is read-only \(numpy", lambda: comm.all_reduce(frozen))
        raises(ValueError, r"^all_reduce: x is read-only \(bytes\)", lambda: comm.all_reduce(b"abc"))
        raises(ValueError, "^all_reduce: x is read-only", lambda: comm.all_reduce(frozen_export))
        raises(ValueError, "^broadcast: x is read-only", lambda: comm.broadcast(frozen_export))
        raises(ValueError, "^all_gather: output is read-only", lambda: comm.all_gather(frozen_export, x[:1]))
        raises(ValueError, "^reduce_scatter: output is read-only", lambda: comm.reduce_scatter(frozen, x))
        raises(TypeError, "^all_gather: input: expected an array.*str", lambda: comm.all_gather(x, "abc"))
        raises(TypeError, "16|format|dtype", lambda: comm.all_reduce(np.ones(3, np.int16)))
        raises(TypeError, "16", lambda: comm.all_reduce(torch.ones(3, dtype=torch.int16)))
        raises(TypeError, "bool|dtype|code 6", lambda: comm.all_reduce(torch.ones(3, dtype=torch.bool)))
        raises(TypeError, "format", lambda: comm.all_reduce(np.ones(3, bool)))
        raises(TypeError, "format", lambda: comm.all_reduce(np.ones(3, ">f4")))
        raises(TypeError, "format", lambda: comm.all_reduce(np.ones(3, [("a", "f4")])))
        raises(TypeError, "format", lambda: comm.all_reduce(np.array(["abcd"])))
        raises(TypeError, "str", lambda: comm.all_reduce("abc"))
        raises(TypeError, "list", lambda: comm.all_reduce([1.0, 2.0]))
        raises(TypeError, "NoneType", lambda: comm.all_reduce(None))
        raises(TypeError, "'x'", lambda: comm.all_reduce())
        raises(ValueError, "(?i)meta|device", lambda: comm.all_reduce(x.to("meta")))
        raises(ValueError, "(?i)sparse|layout|strid", lambda: comm.all_reduce(x.to_sparse()))
        raises(ValueError, "'mean'.*'sum'", lambda: comm.all_reduce(x, "mean"))
        raises(ValueError, "'SUM'", lambda: comm.all_reduce(x, op="SUM"))
        raises(TypeError, "op is .*SUM.*'sum'", lambda: comm.all_reduce(x, dist.ReduceOp.SUM))
        raises(TypeError, "'reduction'", lambda: comm.all_reduce(x, reduction="sum"))
        raises(TypeError, "'x' twice", lambda: comm.all_reduce(x, x=x))
        raises(TypeError, "at most 3", lambda: comm.all_reduce(x, "sum", False, 1))
        raises(ValueError, f"root is {size}", lambda: comm.broadcast(x, size))
        raises(ValueError, "root is -1", lambda: comm.broadcast(x, root=-1))
        raises(TypeError, "root is '0'", lambda: comm.broadcast(x, "0"))
        raises(TypeError, "root is 0.5", lambda: comm.broadcast(x, 0.5))
        raises(ValueError, f"root is {2**40}", lambda: comm.broadcast(x, 2**40))
        raises(
            ValueError, rf"output has 5 elements, expected {size} ranks \* 3", lambda: comm.all_gather(torch.ones(5), x)
        )
        raises(ValueError, "input has 5 elements", lambda: comm.reduce_scatter(x, torch.ones(5)))
        raises(TypeError, "float64.*float32", lambda: comm.all_gather(torch.ones(3 * size).double(), x))
        raises(TypeError, "argument", lambda: comm.barrier(1))
        raises(TypeError, "int16", lambda: comm.empty(3, torch.int16))
        raises(TypeError, "float32", lambda: comm.empty(3, "float32"))
        raises(ValueError, r"shape is \(2, -1\)", lambda: comm.empty((2, -1)))

    with_communicator(transport, body)


@each_transport
def test_a_closed_communicator_says_so(transport):
    def body(rank, world):
        comm = Communicator(transport=transport)
        comm.barrier()
        kept = comm.empty(100000)
        kept.fill_(1.0)
        pending = comm.all_reduce(kept, async_op=True)
        pending.wait()
        comm.close()
        comm.close()
        x = torch.ones(3)
        for method, arguments in {
            "all_reduce": (x,),
            "broadcast": (x,),
            "all_gather": (torch.ones(3 * world), x),
            "reduce_scatter": (x, torch.ones(3 * world)),
            "barrier": (),
            "empty": (3,),
            "all_gather_bytes": (b"",),
        }.items():
            raises(RuntimeError, "closed", functools.partial(getattr(comm, method), *arguments))
        assert (comm.rank, comm.world_size, comm.transport) == (0 if transport == "loopback" else rank, 2, transport)
        del comm
        gc.collect()
        assert (kept == world).all()  # memory outlives what made it
        kept.fill_(3.0)
        return float(kept.sum())

    assert run_ranks(body, 2) == [300000.0, 300000.0]


def test_memory_is_given_back_with_its_last_user():
    def body(rank, world):
        before = len(mapped_memfds("self"))
        comm = Communicator(transport="shm")
        x = comm.empty(1000)
        comm.all_reduce(x)
        comm.close()
        del comm
        gc.collect()
        assert (x == 0).all()
        del x
        gc.collect()
        assert len(mapped_memfds("self")) == before

    run_ranks(body, 2)


@each_transport
def test_an_array_that_nobody_else_holds_lives_until_its_collective_is_complete(transport):
    def body(rank, world):
        with Communicator(transport=transport) as comm:
            for numel in (3, 100000):
                output = torch.zeros(numel * world)
                work = comm.all_gather(output, torch.full((numel,), 7.0), async_op=True)
                reduced = [comm.all_reduce(torch.ones(numel), async_op=True) for _ in range(5)]
                gc.collect()
                scribbled = [torch.full((numel,), 9.0) for _ in range(20)]  # would land in memory that was freed
                for one in reduced:
                    one.wait()
                work.wait()
                assert (output == 7).all()
                assert all((x == 9).all() for x in scribbled)
            comm.all_reduce(torch.ones(1000), async_op=True)  # nobody ever waits
            comm.barrier()

    run_ranks(body, 2)


@each_transport
@pytest.mark.parametrize("in_flight", [False, True])
def test_what_outlives_the_process_group_ends_silently(transport, in_flight, monkeypatch):
    def body(rank, world):
        unraisable = []
        monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(repr(found.exc_value)))
        comm, other = Communicator(transport=transport), Communicator(transport=transport)
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), transport=transport)
        ddp(torch.ones(1, 3)).sum().backward()
        work = [comm.all_reduce(torch.ones(100000), async_op=True)] if in_flight else []
        dist.barrier()  # a peer that let go before this rank started would have failed it
        dist.destroy_process_group()
        other.close()
        del comm, other, work, ddp
        gc.collect()
        assert unraisable == []

    for outcome in run_ranks(body, 2, expect_failures=True):
        assert outcome.complaint() is None, outcome.complaint()
        assert "ignored" not in outcome.output


def test_a_communicator_of_a_group_is_let_go_with_an_operation_in_flight(monkeypatch):
    """What gloo may still write to stays allocated; the peer's operation is complete, and nothing is printed."""

    def body(rank, world):
        unraisable = []
        monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(repr(found.exc_value)))
        store = dist.distributed_c10d._get_default_store()
        comm = Communicator(transport="c10d", timeout=10)
        if rank == 0:
            x = torch.ones(100000)
            address, abandoned = x.data_ptr(), weakref.ref(x)
            work = comm.all_reduce(x, async_op=True)
            del x, work, comm
            gc.collect()
            assert abandoned() is not None, "its memory would be used again"
            assert abandoned().data_ptr() == address
            store.set("let go", "")
        else:
            store.wait(["let go"])
            x = torch.ones(100000)
            comm.all_reduce(x)
            assert (x == 2).all()
        assert unraisable == []
        dist.barrier()

    run_ranks(body, 2)


def test_a_second_thread_at_the_same_time_is_refused():
    def body(rank, world):
        store = dist.distributed_c10d._get_default_store()
        with Communicator(transport="shm") as comm:
            if rank == 1:
                store.wait(["refused"])
                comm.barrier()
                return
            waiting = threading.Thread(target=comm.barrier)
            waiting.start()
            text = ""
            while "thread" not in text:  # until the other thread is inside
                try:
                    comm.all_reduce(torch.empty(0), async_op=True)
                except RuntimeError as error:
                    text = str(error)
                if not waiting.is_alive():
                    break
            store.set("refused", "")
            waiting.join()
            assert "another thread" in text

    outcomes = run_ranks(body, 2, expect_failures=True)
    # An operation that slipped in before the other thread's may be one too many for the peer; the refusal counts.
    assert outcomes[0].complaint() is None, outcomes[0].complaint()


@each_transport
def test_bytes_of_any_length_are_gathered(transport):
    def body(rank, world):
        with Communicator(transport=transport) as comm:
            mine = [b"", b"one", bytes(range(256)) * 500][rank]
            everything = comm.all_gather_bytes(mine)
            nothing = comm.all_gather_bytes(b"")
        return everything, nothing

    results = run_ranks(body, 3)
    expected = [b"", b"one", bytes(range(256)) * 500]
    for rank, (everything, nothing) in enumerate(results):
        assert everything == ([expected[rank]] * 3 if transport == "loopback" else expected)
        assert nothing == [b""] * 3


def test_a_buffer_cannot_be_resized_while_an_operation_uses_it():
    def body(rank, world):
        with Communicator() as comm:
            raw = bytearray(100000)
            if rank == 1:
                dist.barrier()
            work = comm.all_reduce(raw, "max", async_op=True)
            if rank == 0:
                with pytest.raises(BufferError):
                    raw.clear()
                dist.barrier()
            work.wait()
            raw.clear()

    run_ranks(body, 2)
