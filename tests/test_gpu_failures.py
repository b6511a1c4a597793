"""What goes wrong in NCCL, over the stand-ins: a rank that differs, stops, dies or never comes.

A host does not wait for its GPU, so what happened there is raised by what the program asks for next. The only
assertions on time are the deadlines within which a failure must be known.
"""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fake_cuda.ranks import on_gpu
from fake_cuda.shim import values
from programs import iterate_until_it_fails, note_now, seconds_since
from ranks import run_ranks
from toys import batch, mlp

from gpucomm import Communicator
from gpucomm import DistributedDataParallel as Ours
from gpucomm.errors import CommError, CommTimeout, PeerFailed

KNOWN_WITHIN_S = 5.0


@pytest.fixture(autouse=True)
def stand_in(fake_cuda):
    """Built before the ranks are forked; skips where there is no compiler."""


def outcome_of(call):
    """What it raises within the time in which failures are known, asked for again and again."""
    end = time.monotonic() + 2 * KNOWN_WITHIN_S
    while time.monotonic() < end:
        try:
            call()
        except CommError as error:
            return type(error), str(error)
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "other",
    [
        lambda comm, x: comm.all_reduce(x[:3], async_op=True),
        lambda comm, x: comm.all_reduce(x.view(torch.int32), async_op=True),
        lambda comm, x: comm.all_reduce(x, "max", async_op=True),
        lambda comm, x: comm.broadcast(x, async_op=True),
    ],
    ids=["size", "dtype", "op", "collective"],
)
def test_ranks_that_differ_fail_every_wait_from_then_on(other):
    """The stand-in compares what NCCL does not, and has it as an asynchronous error; NCCL itself would hang."""

    def body(rank, world):
        with on_gpu(rank, world) as shim, Communicator(transport="nccl", timeout=20) as comm:
            x = torch.ones(8)
            work = other(comm, x) if rank == 1 else comm.all_reduce(x, async_op=True)
            kind, text = outcome_of(work.done)
            assert issubclass(kind, CommError)
            assert "failed with NCCL's result 3" in text
            for again in (work.wait, work.done, lambda: comm.all_reduce(x, async_op=True)):
                assert outcome_of(again) == (kind, text)
            assert comm.all_gather_bytes(bytes([rank])) == [b"\0", b"\1"]  # the hosts' own way is not concerned
            del work
            assert all("[mismatch]" in error for error in shim.control.take_errors("misuse"))

    run_ranks(body, 2)


def test_a_collective_that_a_peer_does_not_join_is_over_at_the_timeout():
    timeout_s = 1.0

    def body(rank, world):
        with on_gpu(rank, world), Communicator(transport="nccl", timeout=timeout_s) as comm:
            comm.all_reduce(torch.ones(4))
            dist.barrier()
            if rank == 0:
                begin = time.monotonic()
                work = comm.all_reduce(torch.ones(5), async_op=True)
                kind, text = outcome_of(work.done)
                assert kind is CommTimeout
                assert "all_reduce of 5 float32 (rank 0 of 2" in text
                assert "not complete within 1 s" in text
                assert timeout_s * 0.9 < time.monotonic() - begin < timeout_s + KNOWN_WITHIN_S
            dist.barrier()  # with the group's own patience

    run_ranks(body, 2)


def test_survivors_of_a_killed_rank_know_it_and_go_on_without_it_over_a_communicator_of_their_own():
    def body(rank, world):
        with on_gpu(rank, world, script="remote_error ms=200") as shim:
            comm = Communicator(transport="nccl", timeout=20)
            comm.all_reduce(torch.ones(4))
            comm.barrier()
            if rank == 1:
                note_now("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            work = comm.all_reduce(torch.ones(4), async_op=True)
            kind, text = outcome_of(work.done)
            assert seconds_since("killed") < KNOWN_WITHIN_S
            assert kind is CommError
            assert "a peer died or lost its connection" in text
            comm.close()
            group = dist.new_group([0, 2], use_local_synchronization=True)
            with Communicator(group, transport="nccl", timeout=20) as survivors:
                x = survivors.all_reduce(torch.full((4,), rank + 1.0))
                assert values(shim, x) == [4.0] * 4

    first, killed, last = run_ranks(body, 3, expect_failures=True)
    assert killed.exitcode == -signal.SIGKILL
    for survivor in (first, last):
        assert survivor.complaint() is None, survivor.complaint()


class Training:
    def __init__(self, rank, group=None):
        self.rank = rank
        self.ddp = Ours(mlp(), process_group=group, bucket_cap_mb=0.001, timeout=20)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)

    def iterate(self):
        self.optimizer.zero_grad()
        self.ddp(batch(self.rank, 0, 5, 24)).square().mean().backward()
        self.optimizer.step()


def test_survivors_of_a_killed_rank_name_it_and_train_on_with_a_wrapper_of_their_own():
    def body(rank, world):
        with on_gpu(rank, world):
            training = Training(rank)
            for _ in range(3):
                training.iterate()
            dist.barrier()
            if rank == 1:
                note_now("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(CommError) as caught:
                iterate_until_it_fails(training)
            assert seconds_since("killed") < KNOWN_WITHIN_S
            assert isinstance(caught.value, PeerFailed) or isinstance(caught.value.__cause__, PeerFailed)
            assert "rank 1" in str(caught.value)
            group = dist.new_group([0, 2], use_local_synchronization=True)
            training = Training(rank, group)
            for _ in range(3):
                training.iterate()
            return [p.detach().tolist() for p in training.ddp.parameters()]

    first, killed, last = run_ranks(body, 3, expect_failures=True)
    assert killed.exitcode == -signal.SIGKILL
    for survivor in (first, last):
        assert survivor.complaint() is None, survivor.complaint()
    assert first.value == last.value


@pytest.mark.parametrize(
    "made", [lambda: Ours(mlp(), timeout=1.5), lambda: Communicator(transport="nccl", timeout=1.5)]
)
def test_a_rank_that_hangs_in_nccls_initialisation_is_over_at_the_timeout_on_every_rank(made):
    def body(rank, world):
        with on_gpu(rank, world, script="init_hang rank=1 ms=8000"):
            begin = time.monotonic()
            with pytest.raises(CommTimeout, match=r"NCCL's initialisation .* not complete within 1\.5 s"):
                made()
            assert time.monotonic() - begin < 1.5 + KNOWN_WITHIN_S

    run_ranks(body, 2)


def test_a_communicator_that_is_closed_with_collectives_under_way_lets_them_end():
    def body(rank, world):
        with on_gpu(rank, world, script="delay rank=1 ms=300") as shim:
            x = torch.full((1000,), rank + 1.0)
            comm = Communicator(transport="nccl", timeout=20)
            for _ in range(3):
                comm.all_reduce(x, async_op=True)
            comm.close()
            assert values(shim, x) == [3.0 * 2 * 2] * 1000

    run_ranks(body, 2)
