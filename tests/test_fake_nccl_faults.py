"""The stand-in for NCCL: do the faults that a test can script behave as those of NCCL do?"""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch
from fake_cuda.nccl import (
    INTERNAL_ERROR,
    INVALID_USAGE,
    REMOTE_ERROR,
    SHRINK_ABORT,
    SUCCESS,
    SYSTEM_ERROR,
    NcclError,
    on_device,
)
from fake_cuda.program import Program
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fake_cuda")  # built before the ranks are forked


def ones(it, numel=8):
    return it.tensor(torch.ones(numel))


def launch(it, comm, x):
    it.nccl.all_reduce(x, x, "sum", comm, it.stream)


def wait_for_error(it, comm):
    """Polls as a program does that has neither a deadline nor an event."""
    while (state := it.nccl.state(comm)) == SUCCESS:
        it.program.is_idle(it.stream)
    return state


def runs_for(it, seconds):
    """Does the stream become idle meanwhile?"""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if it.program.is_idle(it.stream):
            return True
    return False


def abort(it, comm):
    """Ends it and what is on the stream."""
    it.nccl.call("ncclCommAbort", comm)
    assert it.control.drain()


def run(world, body, *args, **options):
    def on_rank(rank, world):
        with on_device(rank, world, **options) as it:
            return body(it, *args)

    return run_ranks(on_rank, world)


def rules(it):
    return [text[text.index("[") + 1 : text.index("]")] for text in it.misuses()]


# ---- slow, failed and dead ranks


@pytest.mark.parametrize("script", ["delay rank=1 launch=1 ms=200", "delay rank=1 launch=1 steps=20"])
def test_a_delayed_collective_completes_later(script):
    def body(it):
        comm, x = it.init(), ones(it)
        launch(it, comm, x)
        assert it.control.drain()
        begin = time.monotonic()
        launch(it, comm, x)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", comm)
        return x[0].item(), time.monotonic() - begin

    results = run(2, body, script=script)
    assert [value for value, _ in results] == [4.0, 4.0]
    if "ms=" in script:
        assert max(seconds for _, seconds in results) > 0.19  # of the delayed rank, whenever the other began


def test_an_asynchronous_error_is_seen_by_polling_and_the_collective_never_completes():
    def body(it):
        comm, x = it.init(), ones(it)
        launch(it, comm, x)
        assert it.control.drain()
        launch(it, comm, x)
        state = wait_for_error(it, comm) if it.rank == 1 else None
        torch.distributed.barrier()
        assert not runs_for(it, 0.1)
        if it.rank == 1:
            with pytest.raises(NcclError) as caught:
                launch(it, comm, x)
            assert caught.value.result == SYSTEM_ERROR
        else:
            state = it.nccl.state(comm)
        torch.distributed.barrier()
        abort(it, comm)
        return state

    assert run(2, body, script="async_error rank=1 launch=1 result=2") == [SUCCESS, SYSTEM_ERROR]


def test_peers_of_a_failed_rank_may_hear_of_it():
    def body(it):
        comm, x = it.init(), ones(it)
        launch(it, comm, x)
        state = wait_for_error(it, comm)
        torch.distributed.barrier()
        abort(it, comm)
        return state

    script = "async_error rank=1 launch=0 result=2; remote_error ms=50"
    assert run(3, body, script=script) == [REMOTE_ERROR, SYSTEM_ERROR, REMOTE_ERROR]


def survive(it):
    comm, x = it.init(), ones(it)
    launch(it, comm, x)
    assert it.control.drain()
    launch(it, comm, x)
    if it.rank == 1:
        it.control.drain()
    state = wait_for_error(it, comm) if "remote_error" in os.environ.get("SCRIPT", "") else None
    completed = runs_for(it, 0.2)
    state = it.nccl.state(comm) if state is None else state
    abort(it, comm)
    return state, completed


@pytest.mark.parametrize(("remote_error", "state"), [("remote_error ms=50", REMOTE_ERROR), ("", SUCCESS)])
def test_collectives_with_a_dead_rank_never_complete(remote_error, state, monkeypatch):
    monkeypatch.setenv("SCRIPT", remote_error)

    def body(rank, world):
        with on_device(rank, world, script=f"die rank=1 launch=1; {remote_error}") as it:
            return survive(it)

    first, second, third = run_ranks(body, 3, expect_failures=True)
    assert second.exitcode == -signal.SIGKILL
    assert first.value == third.value == (state, False)


def test_peers_of_an_aborted_rank_wait():
    def body(it):
        comm, x = it.init(), ones(it)
        if it.rank == 1:
            it.nccl.call("ncclCommAbort", comm)
        torch.distributed.barrier()
        if it.rank == 0:
            launch(it, comm, x)
            assert not runs_for(it, 0.2)
            abort(it, comm)

    run(2, body)


def test_a_registration_that_a_dead_rank_does_not_come_to():
    def body(rank, world):
        with on_device(rank, world, script="remote_error ms=50") as it:
            comm, address = it.init(), it.nccl.allocate(4096)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(NcclError) as caught:
                it.nccl.window(comm, address, 4096)
            abort(it, comm)
            it.nccl.call("ncclMemFree", address)
            return caught.value.result

    assert run_ranks(body, 2, expect_failures=True)[0].value == REMOTE_ERROR


# ---- init


def test_an_init_that_fails():
    def body(it):
        with pytest.raises(NcclError) as caught:
            it.init()
        return caught.value.result, caught.value.text

    expected = INVALID_USAGE, "Duplicate GPU detected : rank 1 and rank 0"
    script = f"init_error result=5 text={expected[1]}"
    assert run(2, body, script=script) == [expected] * 2


def test_two_ranks_on_one_device():
    def body(rank, world):
        with on_device(rank, world, device=0) as it, pytest.raises(NcclError) as caught:
            it.init()
        return caught.value.result, caught.value.text

    for result, text in run_ranks(body, 2):
        assert result == INVALID_USAGE
        assert text.startswith("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device")


@pytest.mark.parametrize("way", ["host", "variable"])
def test_two_ranks_on_one_device_where_that_is_possible(way):
    def body(rank, world):
        if way == "host":
            os.environ["NCCL_HOSTID"] = f"host {rank}"
        else:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        with on_device(rank, world, device=0, version=22809 if way == "host" else 23007) as it:
            comm, x = it.init(), ones(it)
            launch(it, comm, x)
            assert it.control.drain()
            it.nccl.call("ncclCommDestroy", comm)
            return x[0].item()

    assert run_ranks(body, 2) == [2.0, 2.0]


def test_a_rank_that_never_comes_to_the_init_keeps_the_others_waiting():
    def body(it):
        made = ctypes.c_void_p()
        unique_id = it.shared_id()
        results = []

        def init():
            with Program(it.control, it.rank):
                results.append(
                    it.nccl.result("ncclCommInitRankConfig", ctypes.byref(made), it.world, unique_id, it.rank, None)
                )

        thread = threading.Thread(target=init, daemon=True)
        thread.start()
        thread.join(0.3)
        hangs = thread.is_alive()
        torch.distributed.barrier()
        it.nccl.call("ncclCommAbort", made)
        thread.join()
        assert rules(it) == ["abort-inside"]
        return hangs, results

    assert run(2, body, script="init_hang rank=1") == [(True, [INTERNAL_ERROR])] * 2


def test_a_rank_that_comes_late():
    def body(it):
        begin = time.monotonic()
        comm = it.init()
        it.nccl.call("ncclCommDestroy", comm)
        return time.monotonic() - begin

    assert max(run(2, body, script="init_hang rank=1 ms=200")) > 0.19


def test_a_unique_id_whose_process_is_gone():
    def body(rank, world):
        with on_device(rank, world) as it:
            unique_id = it.shared_id()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.3)
            with pytest.raises(NcclError) as caught:
                it.nccl.init(unique_id, rank, world)
            return caught.value.result

    assert run_ranks(body, 2, expect_failures=True)[1].value == SYSTEM_ERROR


def test_a_unique_id_used_twice():
    with on_device(0, 1) as it:
        unique_id = it.nccl.unique_id()
        comm = it.nccl.init(unique_id, 0, 1)
        with pytest.raises(NcclError) as caught:
            it.nccl.init(unique_id, 0, 1)
        assert caught.value.result == SYSTEM_ERROR
        it.nccl.call("ncclCommDestroy", comm)


# ---- abort, revoke, shrink, split


def test_an_abort_that_hangs():
    with on_device(0, 1, script="abort_hang ms=200") as it:
        comm, begin = it.init(), time.monotonic()
        it.nccl.call("ncclCommAbort", comm)
        assert time.monotonic() - begin > 0.19


def blocked_launch(it, comm, x, results):
    """A thread within a collective's call that does not return."""

    def call():
        with Program(it.control, it.rank):
            results.append(
                it.nccl.result("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), 7, 0, comm, it.stream)
            )

    before = it.control.calls("ncclAllReduce")
    thread = threading.Thread(target=call)
    thread.start()
    while it.control.calls("ncclAllReduce") == before:
        time.sleep(0.001)
    time.sleep(0.05)
    return thread


def test_an_abort_frees_what_another_thread_is_in():
    with on_device(0, 1, script="block launch=0") as it:
        comm, results = it.init(), []
        thread = blocked_launch(it, comm, ones(it), results)
        it.nccl.call("ncclCommAbort", comm)
        thread.join()
        assert results == [INTERNAL_ERROR]
        assert rules(it) == ["abort-inside"]


def test_a_revoke_lets_the_other_thread_out_before_the_abort():
    with on_device(0, 1, script="block launch=0") as it:
        comm, results = it.init(), []
        thread = blocked_launch(it, comm, ones(it), results)
        it.nccl.call("ncclCommRevoke", comm, 0)
        thread.join()
        it.nccl.call("ncclCommAbort", comm)
        assert results == [INTERNAL_ERROR]


def test_a_revoke_ends_work_in_flight_with_garbage_and_only_destroy_split_and_shrink_are_left():
    def body(it):
        comm, x = it.init(), ones(it)
        if it.rank == 0:
            launch(it, comm, x)
            assert not runs_for(it, 0.1)
            it.nccl.call("ncclCommRevoke", comm, 0)
            assert it.control.drain()
            assert x.isnan().all()
        else:
            it.nccl.call("ncclCommRevoke", comm, 0)
        for call in (lambda: launch(it, comm, x), lambda: it.nccl.call("ncclCommFinalize", comm)):
            with pytest.raises(NcclError) as caught:
                call()
            assert caught.value.result == INVALID_USAGE
        assert rules(it) == ["after-end"] * 2
        again = it.nccl.split(comm, 0, it.rank)
        y = ones(it)
        launch(it, again, y)
        assert it.control.drain()
        it.nccl.call("ncclCommDestroy", again)
        it.nccl.call("ncclCommDestroy", comm)
        return y[0].item()

    assert run(2, body) == [2.0, 2.0]


def test_survivors_shrink_and_are_renumbered():
    def body(rank, world):
        with on_device(rank, world, script="die rank=1 comm=0 launch=0") as it:
            comm, x = it.init(), ones(it)
            launch(it, comm, x)
            if rank == 1:
                it.control.drain()
            runs_for(it, 0.2)
            shrunk = it.nccl.shrink(comm, 1, flags=SHRINK_ABORT)
            assert it.control.drain()
            it.nccl.call("ncclCommAbort", comm)
            y = it.tensor(torch.zeros(2))
            own = it.tensor(torch.tensor([float(rank)]))
            it.nccl.all_gather(own, y, shrunk, it.stream)
            assert it.control.drain()
            count = it.nccl.count(shrunk)
            it.nccl.call("ncclCommDestroy", shrunk)
            return count, y.tolist()

    first, _, third = run_ranks(body, 3, expect_failures=True)
    assert first.value == third.value == (2, [0.0, 2.0]), (first, third)


def test_a_split_orders_ranks_by_key():
    def body(it):
        comm = it.init()
        half = it.nccl.split(comm, it.rank % 2, -it.rank)
        out, own = it.tensor(torch.zeros(2)), it.tensor(torch.tensor([float(it.rank)]))
        it.nccl.all_gather(own, out, half, it.stream)
        assert it.control.drain()
        none = it.nccl.split(comm, -1 if it.rank else 0, 0)
        if it.rank == 0:
            assert it.nccl.count(none) == 1
            it.nccl.call("ncclCommDestroy", none)
        else:
            assert none == 0
        for made in (half, comm):
            it.nccl.call("ncclCommDestroy", made)
        return out.tolist()

    assert run(4, body) == [[2.0, 0.0], [3.0, 1.0]] * 2


def test_a_failed_communicator_is_to_be_aborted():
    def body(it):
        comm, x = it.init(), ones(it)
        launch(it, comm, x)
        wait_for_error(it, comm)
        it.nccl.call("ncclCommDestroy", comm)
        assert it.control.drain()
        return rules(it)

    assert run(1, body, script="async_error launch=0 result=6") == [["busy", "destroy-failed"]]


# ---- calls that fail


def test_any_call_may_be_scripted_to_fail():
    with on_device(0, 1) as it:
        it.control.fail_call("ncclMemAlloc", 1, 1)
        with pytest.raises(NcclError) as caught:
            it.nccl.allocate(100)
        assert caught.value.result == 1
        it.nccl.call("ncclMemFree", it.nccl.allocate(100))
