"""The stand-in for NCCL: does it notice each use of NCCL that a device would answer with a hang or with wrong data?"""

import ctypes
import os
import threading
import time

import pytest
import torch
from commands import environment, run_python
from fake_cuda.nccl import (
    IN_PROGRESS,
    INTERNAL_ERROR,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    SUCCESS,
    Config,
    NcclError,
    device_tensor,
    on_device,
)
from fake_cuda.program import Program
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fake_cuda")  # built before the ranks are forked


@pytest.fixture
def alone(fake_cuda):
    """A rank without peers, in this process."""
    with on_device(0, 1) as it:
        yield it


@pytest.fixture
def comm(alone):
    made = alone.init()
    yield made
    alone.nccl.result("ncclCommDestroy", made)
    alone.control.clear_reports()


def only_misuse(it):
    """The one thing that was used wrongly."""
    (text,) = it.misuses()
    return text


def rule_of(text):
    return text[text.index("[") + 1 : text.index("]")]


def error_of(call, *arguments):
    with pytest.raises(NcclError) as caught:
        call(*arguments)
    return caught.value


def ones(it, numel=8):
    return it.tensor(torch.ones(numel))


# ---- ranks that do not do the same


TWO_TYPES = torch.float32, torch.int32
DIFFERENT = {
    "count": lambda it, x, comm: it.nccl.all_reduce(x[: 4 + it.rank], x[: 4 + it.rank], "sum", comm, it.stream),
    "type": lambda it, x, comm: it.nccl.all_reduce(x.view(TWO_TYPES[it.rank]), x, "sum", comm, it.stream),
    "operation": lambda it, x, comm: it.nccl.all_reduce(x, x, ["sum", "avg"][it.rank], comm, it.stream),
    "root": lambda it, x, comm: it.nccl.broadcast(x, x, it.rank, comm, it.stream),
    "kind": lambda it, x, comm: (
        it.nccl.broadcast(x, x, 0, comm, it.stream)
        if it.rank
        else it.nccl.all_reduce(x, x, "sum", comm, it.stream)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_collectives_fail_on_both_ranks(what):
    def body(rank, world):
        with on_device(rank, world) as it:
            comm = it.init()
            DIFFERENT[what](it, ones(it), comm)
            while it.nccl.state(comm) == SUCCESS:
                it.program.is_idle(it.stream)
            state, text = it.nccl.state(comm), only_misuse(it)
            torch.distributed.barrier()
            assert not it.program.is_idle(it.stream)  # it never completes
            it.nccl.call("ncclCommAbort", comm)
            assert it.control.drain()
            return state, text

    for state, text in run_ranks(body, 2):
        assert state == 3
        assert rule_of(text) == "mismatch"
        assert "launch 0 of communicator" in text


def test_a_group_on_one_rank_and_single_calls_on_another_are_different():
    def body(rank, world):
        with on_device(rank, world) as it:
            comm, x, y = it.init(), ones(it), ones(it)
            if rank == 0:
                it.nccl.call("ncclGroupStart")
            it.nccl.all_reduce(x, x, "sum", comm, it.stream)
            it.nccl.all_reduce(y, y, "sum", comm, it.stream)
            if rank == 0:
                it.nccl.call("ncclGroupEnd")
            while it.nccl.state(comm) == SUCCESS:
                it.program.is_idle(it.stream)
            texts = it.misuses()
            torch.distributed.barrier()
            it.nccl.call("ncclCommAbort", comm)
            assert it.control.drain()
            return [rule_of(text) for text in texts]

    assert run_ranks(body, 2) == [["mismatch"]] * 2


# ---- who may use a communicator, and when


def test_two_threads_at_once(alone, comm):
    alone.nccl.script("block launch=0 ms=2000")
    x = ones(alone)

    def launch():
        with Program(alone.control):
            alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)

    thread = threading.Thread(target=launch)
    thread.start()
    while alone.control.calls("ncclAllReduce") == 0:
        time.sleep(0.001)
    time.sleep(0.05)
    alone.nccl.script("")
    alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)
    thread.join()
    assert rule_of(only_misuse(alone)) == "two-threads"
    assert alone.control.drain()


def test_a_communicator_of_the_process_that_this_one_was_forked_from(alone, comm):
    def body(rank, world):
        with pytest.raises(NcclError) as caught:
            alone.nccl.state(comm)
        (text,) = alone.misuses()
        return caught.value.result, rule_of(text)

    assert run_ranks(body, 1, init=False) == [(INVALID_ARGUMENT, "forked")]


@pytest.mark.parametrize("end", ["ncclCommAbort", "ncclCommDestroy"])
def test_a_use_after_the_end(alone, end):
    comm, x = alone.init(), ones(alone)
    alone.nccl.call(end, comm)
    assert error_of(alone.nccl.all_reduce, x, x, "sum", comm, alone.stream).result == INVALID_ARGUMENT
    text = only_misuse(alone)
    assert rule_of(text) == "after-end"
    assert f"freed by {end}" in text


def test_a_use_after_finalize(alone, comm):
    x = ones(alone)
    alone.nccl.call("ncclCommFinalize", comm)
    assert error_of(alone.nccl.all_reduce, x, x, "sum", comm, alone.stream).result == INVALID_USAGE
    assert rule_of(only_misuse(alone)) == "after-end"


def test_no_communicator(alone):
    x = ones(alone)
    assert error_of(alone.nccl.all_reduce, x, x, "sum", None, alone.stream).result == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "no-communicator"


def test_an_init_without_a_current_context_takes_device_0(fake_cuda):
    fake_cuda.machine(device_count=2)
    with on_device(0, 2, device=1) as it:
        it.program.call("cuCtxPopCurrent_v2", None)
        made = it.nccl.init(it.nccl.unique_id(), 0, 1)
        text = only_misuse(it)
        it.program.call("cuCtxPushCurrent_v2", ctypes.c_void_p(it.program.context))
        it.nccl.call("ncclCommDestroy", made)
        assert rule_of(text) == "no-context"


def test_a_collective_with_another_device_current(fake_cuda):
    with on_device(0, 2) as it:
        comm, x = it.nccl.init(it.nccl.unique_id(), 0, 1), ones(it)
        with Program(it.control, 1):
            it.nccl.all_reduce(x, x, "sum", comm, it.stream)
        text = only_misuse(it)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        assert rule_of(text) == "wrong-device"
        assert "is of device 0, current is 1" in text


def test_one_thread_that_drives_two_ranks_without_a_group(fake_cuda):
    with on_device(0, 2) as it:
        unique_id, comms = it.nccl.unique_id(), [ctypes.c_void_p(), ctypes.c_void_p()]
        other = Program(it.control, 1)
        with it.nccl.group():
            it.nccl.call("ncclCommInitRankConfig", ctypes.byref(comms[0]), 2, unique_id, 0, None)
            with other:
                it.nccl.call("ncclCommInitRankConfig", ctypes.byref(comms[1]), 2, unique_id, 1, None)
        x = ones(it)
        it.nccl.all_reduce(x, x, "sum", comms[0], it.stream)
        with other:
            stream, y = other.stream(), device_tensor(other.allocate(8), 8, torch.float32).fill_(1)
            it.nccl.all_reduce(y, y, "sum", comms[1], stream)
            assert it.control.drain()
            text = only_misuse(it)
            for comm in comms:
                it.nccl.call("ncclCommDestroy", comm)
        assert rule_of(text) == "ungrouped"


def test_a_group_end_without_a_start(alone):
    assert alone.nccl.result("ncclGroupEnd") == INVALID_USAGE
    assert rule_of(only_misuse(alone)) == "group"


def test_an_error_within_a_group_is_that_of_the_group_and_nothing_is_launched(alone, comm):
    x, launched = ones(alone), alone.nccl.library.fake_nccl_launched()
    alone.nccl.call("ncclGroupStart")
    alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)
    assert error_of(alone.nccl.broadcast, x, x, 7, comm, alone.stream).result == INVALID_ARGUMENT
    assert alone.nccl.result("ncclGroupEnd") == INVALID_ARGUMENT
    assert alone.nccl.library.fake_nccl_launched() == launched


def test_several_streams_in_one_group(alone, comm):
    x, y = ones(alone), ones(alone)
    with alone.nccl.group():
        alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)
        alone.nccl.all_reduce(y, y, "sum", comm, alone.program.stream("another"))
    assert rule_of(only_misuse(alone)) == "group-streams"
    assert alone.control.drain()


def test_the_legacy_stream(alone, comm):
    x = ones(alone)
    alone.nccl.all_reduce(x, x, "sum", comm, 0)
    assert rule_of(only_misuse(alone)) == "null-stream"
    assert alone.control.drain()


def test_destroying_before_work_is_complete(alone):
    comm, x = alone.init(), ones(alone)
    alone.nccl.script("delay ms=10000")
    alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)
    alone.nccl.call("ncclCommDestroy", comm)
    assert rule_of(only_misuse(alone)) == "busy"
    assert alone.control.drain()


# ---- buffers


def test_buffers_that_overlap_otherwise_than_in_place():
    def body(rank, world):
        with on_device(rank, world) as it:
            comm, x = it.init(), ones(it, 16)
            it.nccl.all_reduce(x[:8], x[4:12], "sum", comm, it.stream)
            it.nccl.reduce_scatter(x, x[8 * (1 - rank) :][:8], "sum", comm, it.stream)
            it.nccl.all_gather(x[8 * (1 - rank) :][:8], x, comm, it.stream)
            assert it.control.drain()
            texts = it.misuses()
            it.nccl.call("ncclCommDestroy", comm)
            return [rule_of(text) for text in texts]

    assert run_ranks(body, 2) == [["in-place"] * 3] * 2


def test_null_buffers_are_refused(alone, comm):
    for buffers in ((None, ones(alone).data_ptr()), (ones(alone).data_ptr(), None)):
        assert alone.nccl.result("ncclAllReduce", *buffers, 4, 7, 0, comm, alone.stream) == INVALID_ARGUMENT


def test_more_than_the_stand_in_carries_is_refused(alone, comm):
    address = ones(alone).data_ptr()
    assert alone.nccl.result("ncclAllReduce", address, address, 2**40, 7, 0, comm, alone.stream) == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "capacity"


def test_memory_that_is_no_device_memory(alone, comm):
    x = torch.ones(8)
    alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)
    assert alone.control.drain()
    assert {report.kind for report in alone.control.errors()} == {"memory"}
    alone.control.clear_reports()
    alone.nccl.call("ncclCommAbort", comm)


def test_freed_memory_is_not_freed_again(alone):
    address = alone.nccl.allocate(100)
    assert address % 4096 == 0
    alone.nccl.call("ncclMemFree", address)
    assert alone.nccl.result("ncclMemFree", address) == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "unpaired-free"


def test_memory_of_nccl_is_freed_by_nccl(alone):
    address = alone.nccl.allocate(100)
    alone.program.free(address)
    alone.nccl.result("ncclMemFree", address)
    assert rule_of(only_misuse(alone)) == "unpaired-free"


# ---- windows


@pytest.fixture
def arena(alone):
    address = alone.nccl.allocate(16384)
    yield address
    alone.nccl.result("ncclMemFree", address)
    alone.control.clear_reports()


def test_a_window_that_is_not_aligned(alone, comm, arena):
    error = error_of(alone.nccl.window, comm, arena + 512, 4096)
    assert error.result == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "window-alignment"


def test_a_window_twice(alone, comm, arena):
    windows = [alone.nccl.window(comm, arena, 8192), alone.nccl.window(comm, arena + 4096, 8192)]
    assert rule_of(only_misuse(alone)) == "double-window"
    for window in windows:
        alone.nccl.call("ncclCommWindowDeregister", comm, window)


def test_a_window_deregistered_twice(alone, comm, arena):
    window = alone.nccl.window(comm, arena, 8192)
    alone.nccl.call("ncclCommWindowDeregister", comm, window)
    assert alone.nccl.result("ncclCommWindowDeregister", comm, window) == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "unknown-window"


def test_a_window_past_its_memory(alone, comm, arena):
    assert error_of(alone.nccl.window, comm, arena, 16384 + 4096).result == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "window-range"


def test_memory_freed_while_it_is_a_window(alone, comm):
    address = alone.nccl.allocate(8192)
    window = alone.nccl.window(comm, address, 8192)
    alone.nccl.call("ncclMemFree", address)
    assert rule_of(only_misuse(alone)) == "freed-while-registered"
    alone.nccl.call("ncclCommWindowDeregister", comm, window)
    assert rule_of(only_misuse(alone)) == "freed-while-registered"


def test_memory_freed_while_it_is_registered(alone, comm):
    address = alone.program.allocate(100)
    handle = alone.nccl.register(comm, address, 400)
    alone.program.free(address)
    alone.nccl.call("ncclCommDeregister", comm, handle)
    assert rule_of(only_misuse(alone)) == "freed-while-registered"


def test_a_communicator_that_ends_with_a_window(alone, arena):
    comm = alone.init()
    alone.nccl.window(comm, arena, 8192)
    alone.nccl.call("ncclCommDestroy", comm)
    assert rule_of(only_misuse(alone)) == "still-registered"


def test_memory_that_cannot_be_a_window_gives_none_without_an_error(alone, comm):
    plain = alone.control.library.fake_allocate
    plain.restype, plain.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p)
    assert alone.nccl.window(comm, plain(8192, 4096, b"plain"), 8192) == 0
    alone.nccl.script("no_cumem")
    assert alone.nccl.window(comm, alone.nccl.allocate(8192), 8192) == 0


def partly_registered(rank, world, script, shift):
    with on_device(rank, world, script=script) as it:
        comm, address = it.init(), it.nccl.allocate(8192)
        window = it.nccl.window(comm, address, 8192)
        x = device_tensor(address + shift * rank, 8, torch.float32).fill_(1)
        it.nccl.all_reduce(x, x, "sum", comm, it.stream)
        assert it.control.drain()
        rules = [rule_of(text) for text in it.misuses()]
        it.nccl.call("ncclCommWindowDeregister", comm, window)
        it.nccl.call("ncclCommDestroy", comm)
        it.nccl.call("ncclMemFree", address)
        return rules, bool(window)


def test_a_window_on_some_ranks_only():
    assert run_ranks(partly_registered, 2, "no_windows rank=1", 0) == [
        (["window-partial"], True),
        (["window-partial"], False),
    ]


def test_other_places_of_a_window_on_other_ranks():
    assert run_ranks(partly_registered, 2, "", 64) == [(["window-partial"], True)] * 2


def test_a_window_used_as_it_should_be():
    assert run_ranks(partly_registered, 2, "", 0) == [([], True)] * 2


def test_no_windows_anywhere():
    assert run_ranks(partly_registered, 2, "no_windows", 64) == [([], False)] * 2


@pytest.mark.parametrize(
    ("version", "shared_gpu", "found"), [(22703, False, False), (22809, False, True), (22809, True, False)]
)
def test_windows_between_hosts_and_on_a_shared_gpu(version, shared_gpu, found):
    def body(rank, world):
        os.environ["NCCL_HOSTID"] = f"host {rank}"
        with on_device(rank, world, version=version, device=0 if shared_gpu else rank) as it:
            comm, address = it.init(), it.nccl.allocate(4096)
            window = it.nccl.window(comm, address, 4096)
            it.nccl.call("ncclCommWindowDeregister", comm, window)
            it.nccl.call("ncclCommDestroy", comm)
            it.nccl.call("ncclMemFree", address)
            return bool(window)

    assert run_ranks(body, 2) == [found] * 2


def test_windows_of_different_sizes():
    def body(rank, world):
        with on_device(rank, world) as it:
            comm, address = it.init(), it.nccl.allocate(8192)
            window = it.nccl.window(comm, address, 4096 * (1 + rank))
            text = only_misuse(it)
            it.nccl.call("ncclCommWindowDeregister", comm, window)
            it.nccl.call("ncclCommDestroy", comm)
            it.nccl.call("ncclMemFree", address)
            return rule_of(text)

    assert run_ranks(body, 2) == ["mismatch"] * 2


# ---- configurations


REFUSED = {"min_ctas": 4, "max_ctas": 0, "blocking": 2, "cga_cluster_size": -1, "split_share": 3, "nvls_ctas": 0}


@pytest.mark.parametrize("field", REFUSED)
def test_values_of_a_config_that_nccl_refuses(alone, field):
    assert error_of(alone.init, Config(**{field: REFUSED[field]})).result == INVALID_ARGUMENT


def test_both_cta_limits_are_taken(alone):
    alone.nccl.call("ncclCommDestroy", alone.init(Config(min_ctas=1, max_ctas=4)))


def test_a_config_without_its_magic(alone):
    error = error_of(alone.init, Config(magic=1))
    assert error.result == INVALID_ARGUMENT
    assert "NCCL_CONFIG_INITIALIZER" in error.text


def test_a_config_whose_size_is_not_that_of_its_version(alone):
    comm = alone.init(Config(version=22700, size=48))
    assert rule_of(only_misuse(alone)) == "config"
    alone.nccl.call("ncclCommDestroy", comm)


@pytest.mark.parametrize("version", [21805, 22509])
def test_fields_that_a_library_does_not_know_are_not_read(version):
    with on_device(0, 1, version=version) as it:
        it.nccl.call("ncclCommDestroy", it.init(Config(nvls_ctas=0)))


# ---- communicators that do not block


@pytest.fixture
def polled(alone):
    """Ready, of the configuration blocking=0."""
    made = ctypes.c_void_p()
    config = Config(blocking=0)
    reference = ctypes.byref(made), 1, alone.nccl.unique_id(), 0, ctypes.byref(config)
    assert alone.nccl.result("ncclCommInitRankConfig", *reference) == IN_PROGRESS
    assert alone.nccl.state(made) == IN_PROGRESS
    assert alone.nccl.state(made) == SUCCESS
    yield made
    alone.nccl.result("ncclCommAbort", made)


def test_what_does_not_block_is_launched_by_polling(alone, polled):
    x, launched = ones(alone), alone.nccl.library.fake_nccl_launched()
    arguments = x.data_ptr(), x.data_ptr(), 8, 7, 0, polled, alone.stream
    assert alone.nccl.result("ncclAllReduce", *arguments) == IN_PROGRESS
    assert alone.nccl.library.fake_nccl_launched() == launched
    assert [alone.nccl.state(polled), alone.nccl.state(polled)] == [IN_PROGRESS, SUCCESS]
    assert alone.nccl.library.fake_nccl_launched() == launched + 1
    assert alone.control.drain()


def test_a_group_of_what_does_not_block_is_polled_as_one(alone, polled):
    x, y = ones(alone), ones(alone)
    alone.nccl.call("ncclGroupStart")
    for tensor in (x, y):
        arguments = tensor.data_ptr(), tensor.data_ptr(), 8, 7, 0, polled, alone.stream
        assert alone.nccl.result("ncclAllReduce", *arguments) == IN_PROGRESS
    launched = alone.nccl.library.fake_nccl_launched()
    assert alone.nccl.result("ncclGroupEnd") == IN_PROGRESS
    assert [alone.nccl.state(polled), alone.nccl.state(polled)] == [IN_PROGRESS, SUCCESS]
    assert alone.nccl.library.fake_nccl_launched() == launched + 1
    assert alone.control.drain()


def test_it_may_take_more_polls(alone, polled):
    alone.nccl.script("polls n=3")
    x = ones(alone)
    alone.nccl.result("ncclAllReduce", x.data_ptr(), x.data_ptr(), 8, 7, 0, polled, alone.stream)
    assert [alone.nccl.state(polled) for _ in range(4)] == [IN_PROGRESS] * 3 + [SUCCESS]
    assert alone.control.drain()


def test_a_use_while_in_progress(alone, polled):
    x = ones(alone)
    arguments = x.data_ptr(), x.data_ptr(), 8, 7, 0, polled, alone.stream
    assert alone.nccl.result("ncclAllReduce", *arguments) == IN_PROGRESS
    assert alone.nccl.result("ncclAllReduce", *arguments) == INVALID_ARGUMENT
    assert rule_of(only_misuse(alone)) == "in-progress"


def test_blocking_and_non_blocking_communicators_in_one_group(alone, comm, polled):
    x, y = ones(alone), ones(alone)
    alone.nccl.call("ncclGroupStart")
    alone.nccl.all_reduce(x, x, "sum", comm, alone.stream)
    alone.nccl.result("ncclAllReduce", y.data_ptr(), y.data_ptr(), 8, 7, 0, polled, alone.stream)
    assert alone.nccl.result("ncclGroupEnd") == IN_PROGRESS
    assert rule_of(only_misuse(alone)) == "group-blocking"
    assert [alone.nccl.state(polled), alone.nccl.state(polled)] == [IN_PROGRESS, SUCCESS]
    assert alone.control.drain()


def test_a_rank_that_comes_twice_with_one_unique_id(fake_cuda):
    with on_device(0, 2) as it:
        unique_id, config = it.nccl.unique_id(), Config(blocking=0)
        comms = [ctypes.c_void_p(), ctypes.c_void_p()]
        for made in comms:
            arguments = ctypes.byref(made), 2, unique_id, 0, ctypes.byref(config)
            assert it.nccl.result("ncclCommInitRankConfig", *arguments) == IN_PROGRESS
        assert [it.nccl.state(made) for made in comms] == [IN_PROGRESS] * 2
        assert [it.nccl.state(made) for made in comms] == [IN_PROGRESS, INTERNAL_ERROR]
        assert rule_of(only_misuse(it)) == "unique-id-twice"
        for made in comms:
            it.nccl.call("ncclCommAbort", made)


# ---- several communicators on one device


def two_communicators(rank, world, crossed, script, streams, order="earliest"):
    """Each rank launches on both, the second one in the other order where crossed."""
    with on_device(rank, world, script=script) as it:
        it.control.order(order, seed=rank)
        comms = [it.init(), it.init()]
        tensors = [ones(it), ones(it)]
        order = [1, 0] if crossed and rank == 1 else [0, 1]
        own = [it.stream, it.program.stream("another")] if streams == 2 else [it.stream] * 2
        for i in order:
            it.nccl.all_reduce(tensors[i], tensors[i], "sum", comms[i], own[i])
        it.control.deadline(3)
        complete = it.control.drain()
        reports = [report.text for report in it.control.reports("misuse")]
        it.control.clear_reports()
        torch.distributed.barrier()
        for comm in comms:
            it.nccl.call("ncclCommDestroy" if complete else "ncclCommAbort", comm)
        assert it.control.drain()
        return complete, {rule_of(text) for text in reports}


def test_another_launch_order_is_reported_also_where_there_is_room():
    results = run_ranks(two_communicators, 2, True, "", 2)
    assert [complete for complete, _ in results] == [True, True]
    assert all(rules == {"launch-order"} for _, rules in results)


@pytest.mark.parametrize(("script", "streams"), [("slots n=1", 2), ("", 1)])
def test_crossed_launches_wait_for_each_other_where_there_is_no_room(script, streams):
    results = run_ranks(two_communicators, 2, True, script, streams)
    assert [complete for complete, _ in results] == [False, False]
    assert any(rules == {"deadlock"} for _, rules in results)


@pytest.mark.parametrize(("script", "streams"), [("slots n=1", 1), ("", 1), ("", 2)])
def test_one_launch_order_is_not_reported(script, streams):
    assert run_ranks(two_communicators, 2, False, script, streams) == [(True, set())] * 2


@pytest.mark.parametrize("order", ["earliest", "latest", "random"])
def test_the_implicit_launch_order_is_that_of_the_host_whatever_the_device_prefers(order, monkeypatch):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    assert run_ranks(two_communicators, 2, False, "slots n=1", 2, order) == [(True, set())] * 2


def test_without_it_the_device_may_begin_with_the_later_launch():
    def body(rank, world):
        return two_communicators(rank, world, False, "slots n=1", 2, ["earliest", "latest"][rank])

    results = run_ranks(body, 2)
    assert [complete for complete, _ in results] == [False, False]
    assert any(rules == {"deadlock"} for _, rules in results)


# ---- the script


@pytest.mark.parametrize("text", ["dealy ms=3", "delay miles=3", "delay ms=soon", "delay ms", "allow rule=all"])
def test_a_script_that_means_nothing_is_refused(alone, text):
    with pytest.raises(ValueError, match=r"unknown verb|unknown rule|does not take|whole number"):
        alone.nccl.script(text)


PROGRAM = """
import ctypes
from fake_cuda.control import loaded
from fake_cuda.nccl import Nccl, NcclError
from fake_cuda.program import Program

control = loaded()
nccl = Nccl(control)
with Program(control):
    try:
        print(nccl.init(nccl.unique_id(), 0, 1) != 0)
    except NcclError as error:
        print(error.result, error.text)
print([report.text for report in control.errors()])
"""


@pytest.mark.parametrize(
    ("text", "printed", "reported"),
    [
        ("init_error result=2 text=no route to host", "2 no route to host", "[]"),
        ("dealy ms=3", "3 FAKE_NCCL_SCRIPT: unknown verb 'dealy'", "[script] FAKE_NCCL_SCRIPT: unknown verb 'dealy'"),
        ("delay ms=3", "True", "[]"),
    ],
)
def test_the_script_of_the_environment(tmp_path, text, printed, reported):
    here = os.path.dirname(os.path.abspath(__file__))
    env = environment([here], FAKE_NCCL_SCRIPT=text)
    done = run_python("-c", PROGRAM, cwd=tmp_path, env=env)
    first, second = done.stdout.splitlines()
    assert first == printed
    assert reported in second


def test_a_rule_may_be_allowed(alone, comm):
    alone.nccl.script("allow rule=null-stream")
    x = ones(alone)
    alone.nccl.all_reduce(x, x, "sum", comm, 0)
    assert alone.control.drain()
    assert alone.misuses() == []
