"""Communicator.shrink: those that remain go on among themselves."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from expect import raises
from fake_cuda.ranks import on_gpu
from fake_cuda.shim import values
from ranks import run_ranks

from gpucomm import Communicator, NcclOptions
from gpucomm.errors import CommError, CommTimeout


def sums(comm, rank):
    x = torch.full((5,), float(10**rank))
    comm.all_reduce(x)
    return x


def fails_within(seconds, call):
    """What the call raises once communication is known to be broken."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            call()
        except CommError as error:
            return error
        time.sleep(0.02)
    raise AssertionError(f"still works after {seconds} s")


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_the_ranks_that_remain_reduce_among_themselves(transport):
    def body(rank, world):
        with Communicator(transport=transport) as comm:
            assert sums(comm, rank).tolist() == [1111.0] * 5
            if rank == 1:
                return
            with comm.shrink([1]) as smaller:
                assert (smaller.rank, smaller.world_size) == ([0, None, 1, 2][rank], 3)
                assert smaller.transport == comm.transport
                assert sums(smaller, rank).tolist() == [1101.0] * 5
                if rank == 3:
                    return
                with smaller.shrink({2}) as smallest:
                    assert sums(smallest, rank).tolist() == [101.0] * 5

    run_ranks(body, 4)


def test_after_a_peers_death_the_survivors_go_on():
    def body(rank, world):
        comm = Communicator(timeout=20)
        sums(comm, rank)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert "rank 2" in str(fails_within(10, lambda: sums(comm, rank)))
        with comm.shrink([2]) as smaller:
            comm.close()
            assert sums(smaller, rank).tolist() == [11.0] * 5
        return True

    outcomes = run_ranks(body, 3, expect_failures=True)
    assert [outcome.value for outcome in outcomes[:2]] == [True, True], outcomes


@pytest.mark.parametrize(("version", "inits"), [(22509, 2), (23203, 1)])
@pytest.mark.parametrize("blocking", [True, False])
def test_on_gpus_nccl_makes_it_of_the_larger_one_where_it_can(fake_cuda, version, inits, blocking):
    def body(rank, world):
        with on_gpu(rank, world, version=version) as shim:
            comm = Communicator(transport="nccl", nccl_options=NcclOptions(max_ctas=2, blocking=blocking))
            assert values(shim, sums(comm, rank)) == [111.0] * 5
            if rank != 0:
                with comm.shrink([0]) as smaller:
                    assert smaller.transport == "nccl"
                    assert values(shim, sums(smaller, rank)) == [110.0] * 5
                assert shim.control.calls("ncclCommInitRankConfig") == inits
                assert shim.control.calls("ncclCommShrink") == 2 - inits
                assert shim.nccl.config("max_ctas") == 2
            dist.barrier()
            comm.close()

    run_ranks(body, 3)


def test_on_gpus_one_that_failed_is_made_anew(fake_cuda):
    def body(rank, world):
        with on_gpu(rank, world, version=23203, script="async_error comm=0 launch=1 result=6") as shim:
            comm = Communicator(transport="nccl", timeout=10)
            assert "lost its connection" in str(fails_within(10, lambda: sums(comm, rank)))
            if rank != 2:
                with comm.shrink([2]) as smaller:
                    assert values(shim, sums(smaller, rank)) == [11.0] * 5
                assert shim.control.calls("ncclCommShrink") == 0
            dist.barrier()
            comm.close()

    run_ranks(body, 3)


def test_what_cannot_be_excluded_is_refused():
    def body(rank, world):
        comm = Communicator()
        for exclude in ([], [rank], [2], [-1], [1.0 - rank], [not rank], [str(1 - rank)], 1 - rank, None):
            raises(ValueError, "shrink: exclude is", lambda exclude=exclude: comm.shrink(exclude))
        comm.close()
        raises(RuntimeError, "shrink: this communicator is closed", lambda: comm.shrink([1 - rank]))

    run_ranks(body, 2)


def test_ranks_that_exclude_others_than_their_peers_learn_it_within_the_timeout():
    def body(rank, world):
        with Communicator(timeout=2) as comm:
            if rank < 2:
                raises(CommTimeout, "shrink: not all of ranks", lambda: comm.shrink([2 - 2 * rank]))
            dist.barrier()

    run_ranks(body, 3)
