"""A forked child of a rank may hold what its parent had, and does no harm to its group."""

import gc
import os
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from programs import PROGRAMS, Communication, Training, each_program, each_transport
from ranks import run_ranks

from gpucomm import Communicator

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def in_a_child(body):
    """Runs it in a forked child, which then ends as a Python process does; returns what it printed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        status = 1
        try:
            body()
            gc.collect()
            print("done", flush=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def use(running):
    """All that a child may try; what speaks to peers is refused at once."""
    before = time.monotonic()
    if isinstance(running, Training):
        ddp = running.ddp
        with pytest.raises(RuntimeError, match="forked"):
            ddp.module(torch.ones(1, 60)).sum().backward()
        with pytest.raises(ValueError, match="forked"):
            ddp.sync_buffers() if list(ddp.buffers()) else ddp._comm.barrier()
        for p in ddp.parameters():
            p.grad.fill_(1e9)  # lies in the memory of a bucket
        with torch.no_grad():
            ddp(torch.ones(1, 60))
        ddp._reduction.transport.abort("no matter")
        with ddp.no_sync():
            ddp(torch.ones(1, 60)).sum().backward()
    else:
        comm = running.comm
        for call in (comm.barrier, running.iterate, lambda: comm.all_gather_bytes(b"")):
            with pytest.raises(ValueError, match="forked"):
                call()
        for x in running.arrays:
            x.fill_(1e9)
        comm._transport.abort("no matter")
    with pytest.raises(RuntimeError, match="forked"):
        Communicator()
    assert time.monotonic() - before < 3


def hold(running):
    pass


def destroy(running):
    if isinstance(running, Communication):
        running.comm.close()
    else:
        running.ddp._reduction.close()
    vars(running).clear()
    gc.collect()


@each_transport
@each_program
@pytest.mark.parametrize("act", [hold, use, destroy])
def test_a_forked_child_does_no_harm_to_its_parents_group(act, program, transport):
    def body(rank, world):
        torch.set_num_threads(1)
        running = PROGRAMS[program](transport, timeout=10)
        for _ in range(3):
            running.iterate()
        if program == "training":
            grads = [p.grad.clone() for p in running.ddp.parameters()]
        if rank == 1:
            status, text = in_a_child(lambda: act(running))
            assert (status, text) == (0, "done\n"), text
        if program == "training":
            assert all(torch.equal(p.grad, g) for p, g in zip(running.ddp.parameters(), grads, strict=True))
            assert_same_gradients(running, world)
        for _ in range(3):
            running.iterate()
        if program == "communicator":
            assert all((x == world).all() for x in running.arrays)

    run_ranks(body, 2)


def assert_same_gradients(training, world):
    training.backward()
    for p in training.ddp.parameters():
        gathered = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(gathered, p.grad.contiguous())
        assert all(torch.equal(g, gathered[0]) for g in gathered)


@each_transport
def test_a_child_that_is_forked_with_an_operation_in_flight_does_no_harm(transport):
    def body(rank, world):
        comm = Communicator(transport=transport, timeout=10)
        x = comm.empty(100000).fill_(1.0)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["child ended"])
            comm.all_reduce(x)
        else:
            work = comm.all_reduce(x, async_op=True)

            def child():
                nonlocal work, comm
                for call in (work.wait, work.done):
                    with pytest.raises(ValueError, match="forked"):
                        call()
                comm.close()
                del work, comm

            status, text = in_a_child(child)
            store.set("child ended", "")
            assert (status, text) == (0, "done\n"), text
            work.wait()
        assert (x == world).all()

    run_ranks(body, 2)


@each_transport
def test_a_child_that_is_forked_by_a_signal_in_the_middle_of_a_wait_does_no_harm(transport):
    def body(rank, world):
        comm = Communicator(transport=transport, timeout=10)
        store = dist.distributed_c10d._get_default_store()
        children = []

        def fork(*_):
            pid = os.fork()
            children.append(pid)
            if pid == 0:
                signal.alarm(5)

        if rank == 1:
            time.sleep(1)
            comm.barrier()
        else:
            signal.signal(signal.SIGUSR2, fork)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            try:
                comm.barrier()
            except ValueError as error:
                os._exit(7 if children == [0] and "forked" in str(error) else 8)
            assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
        comm.barrier()
        store.set(f"done {rank}", "")

    run_ranks(body, 2)
