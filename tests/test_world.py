"""How ranks meet: timeouts, the choice of a transport, what one of them refuses, address space."""

import functools
import os
import re
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expect import raises
from ranks import run_ranks

from gpucomm import Communicator, DistributedDataParallel, _core
from gpucomm.errors import CommError, CommTimeout, PeerFailed, TransportUnavailable
from gpucomm.reduction.layout.buckets import BucketPlan

each_transport = pytest.mark.parametrize("transport", ["shm", "c10d", "loopback"])


@pytest.mark.parametrize("timeout", [0, -1, 0.0, timedelta(0), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    def body(rank, world):
        raises(ValueError, re.escape(repr(timeout)), lambda: Communicator(timeout=timeout))

    run_ranks(body, 1)


@pytest.mark.parametrize("transport", ["shm", "c10d"])  # loopback waits for nobody
@pytest.mark.parametrize("source", ["argument", "timedelta", "environment", "argument over environment"])
def test_the_timeout_is_the_one_that_was_asked_for(transport, source, monkeypatch):
    timeout = {"argument": 0.4, "timedelta": timedelta(seconds=0.4), "argument over environment": 0.4}.get(source)

    def body(rank, world):
        if "environment" in source:
            monkeypatch.setenv("GPUCOMM_TIMEOUT_S", "0.4" if source == "environment" else "55")
        store = dist.distributed_c10d._get_default_store()
        comm = Communicator(transport=transport, timeout=timeout)
        if rank == 1:
            store.wait(["timed_out"])
            return
        with pytest.raises(CommTimeout, match=r"0\.4") as caught:
            comm.barrier()
        assert caught.value.missing == [1]
        store.set("timed_out", "")

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("timeout", ["inf", "1e30", float("inf"), 1e30, timedelta.max])
def test_a_timeout_without_end_is_served(transport, timeout, monkeypatch):
    def body(rank, world):
        if isinstance(timeout, str):
            monkeypatch.setenv("GPUCOMM_TIMEOUT_S", timeout)
        with Communicator(transport=transport, timeout=None if isinstance(timeout, str) else timeout) as comm:
            if rank == 1:
                time.sleep(0.3)  # long enough for the peer to look at its deadline
            comm.all_reduce(torch.ones(100000))

    run_ranks(body, 2)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_a_timeout_in_the_environment_that_is_none_is_refused(text, monkeypatch):
    def body(rank, world):
        monkeypatch.setenv("GPUCOMM_TIMEOUT_S", text)
        raises(ValueError, f"GPUCOMM_TIMEOUT_S is '{text}'", Communicator)

    run_ranks(body, 1)


def test_the_environment_chooses_the_transport_and_an_argument_wins(monkeypatch):
    def body(rank, world):
        assert Communicator().transport == "shm"
        monkeypatch.setenv("GPUCOMM_TRANSPORT", "c10d")
        assert Communicator().transport == "c10d"
        assert Communicator(transport="shm").transport == "shm"
        monkeypatch.setenv("GPUCOMM_TRANSPORT", "smoke")
        raises(ValueError, "GPUCOMM_TRANSPORT is 'smoke'.*shm", Communicator)

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", ["gloo", "", None, 3])
def test_an_unknown_transport_is_refused(transport):
    def body(rank, world):
        raises((ValueError, TypeError), f"transport is {transport!r}.*shm", lambda: Communicator(transport=transport))

    run_ranks(body, 1)


WITHDRAWALS = {
    "transport in the environment": ("GPUCOMM_TRANSPORT", "smoke", {}, "GPUCOMM_TRANSPORT is 'smoke'"),
    "CUDA's library in the environment": (
        "GPUCOMM_CUDA_LIBRARY",
        "/nowhere/libcuda.so.1",
        {},
        "GPUCOMM_CUDA_LIBRARY is '/nowhere/libcuda.so.1'",
    ),
    "NCCL's library in the environment": (
        "GPUCOMM_NCCL_LIBRARY",
        "/nowhere/libnccl.so.2",
        {},
        "GPUCOMM_NCCL_LIBRARY is '/nowhere/libnccl.so.2'",
    ),
    "timeout in the environment": ("GPUCOMM_TIMEOUT_S", "soon", {}, "GPUCOMM_TIMEOUT_S is 'soon'"),
    "transport": (None, None, {"transport": "gloo"}, "transport is 'gloo'"),
    "timeout": (None, None, {"timeout": -2}, "timeout is -2"),
}


@pytest.mark.parametrize("program", ["communicator", "wrapper"])
@pytest.mark.parametrize("what", WITHDRAWALS)
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_refuses_at_construction_is_raised_on_all_and_the_next_one_works(what, who, program, monkeypatch):
    variable, value, arguments, text = WITHDRAWALS[what]

    def make(**arguments):
        return Communicator(**arguments) if program == "communicator" else wrapper(**arguments)

    def wrapper(**arguments):
        return DistributedDataParallel(torch.nn.Linear(2, 2), **arguments)

    def body(rank, world):
        before = time.monotonic()
        if rank == who:
            if variable is not None:
                monkeypatch.setenv(variable, value)
            raises(ValueError, f"^{text}, accepted", lambda: make(**arguments))
            monkeypatch.undo()
        else:
            raises(CommError, f"^rank {who} could not take part: ValueError: {text}", make)
        assert time.monotonic() - before < 10
        made = make(transport="shm")
        (made if program == "communicator" else made._comm).barrier()

    run_ranks(body, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"device_ids": [1]}, ValueError, "device_ids"),
        ({"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb"),
        ({"mixed_precision": object()}, TypeError, "mixed_precision"),
        ({"plan": BucketPlan(())}, ValueError, "plan"),
    ],
    ids=["device_ids", "bucket_cap_mb", "mixed_precision", "plan"],
)
def test_an_argument_of_the_wrapper_that_one_rank_refuses_is_raised_on_all(arguments, kind, text):
    def body(rank, world):
        wrap = functools.partial(DistributedDataParallel, torch.nn.Linear(2, 2))
        if rank == 1:
            raises(kind, text, lambda: wrap(**arguments))
        else:
            raises(CommError, f"^rank 1 could not take part: {kind.__name__}: .*{text}", wrap)
        wrap()._comm.barrier()

    run_ranks(body, 2)


def test_a_rank_that_refuses_alone_says_so_soon():
    def body(rank, world):
        if rank == 0:
            before = time.monotonic()
            raises(ValueError, "transport is 'gloo'", lambda: Communicator(transport="gloo"))
            assert time.monotonic() - before < 10

    run_ranks(body, 2)


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    def body(rank, world):
        monkeypatch.setenv("GPUCOMM_TRANSPORT", "")
        monkeypatch.setenv("GPUCOMM_TIMEOUT_S", "")
        assert Communicator().transport == "shm"

    run_ranks(body, 2)


def test_transports_that_differ_between_ranks_raise_on_every_rank():
    def body(rank, world):
        raises(CommError, "transport differs.*'shm' on rank 0.*'c10d' on rank 1", lambda: make(rank))

    def make(rank):
        Communicator(transport="c10d" if rank == 1 else "shm", timeout=10)

    run_ranks(body, 3)


def test_without_a_process_group_it_says_what_to_do():
    raises((RuntimeError, ValueError), "init_process_group", Communicator)


def test_a_rank_outside_the_group_is_refused():
    def body(rank, world):
        group = dist.new_group([0])
        if rank == 1:
            raises((ValueError, TypeError), "member", lambda: Communicator(group))
        else:
            assert Communicator(group).world_size == 1

    run_ranks(body, 2)


def in_a_pid_namespace_of_its_own(rank, monkeypatch):
    """Rank 1 seems to run in another container: what it tells the others in the handshake says so."""
    if rank != 1:
        return
    shm = _core.ShmTransport

    def elsewhere(*, exchange, **options):
        def pretend(mine):
            return exchange(re.sub(rb"pid:\[\d+\]", lambda found: b"pid:[1]".ljust(len(found[0]), b"\0"), mine))

        return shm(exchange=pretend, **options)

    monkeypatch.setattr(_core, "ShmTransport", elsewhere)


def test_shared_memory_that_cannot_be_had_raises_on_every_rank(monkeypatch):
    def body(rank, world):
        in_a_pid_namespace_of_its_own(rank, monkeypatch)
        raises(TransportUnavailable, "rank 1 is in another pid namespace", lambda: Communicator(transport="shm"))

    run_ranks(body, 3)


def test_auto_takes_the_group_on_every_rank_where_memory_cannot_be_shared(monkeypatch):
    def body(rank, world):
        in_a_pid_namespace_of_its_own(rank, monkeypatch)
        comm = Communicator()
        x = torch.ones(1000)
        comm.all_reduce(x)
        assert (x == world).all()
        return comm.transport

    assert run_ranks(body, 3) == ["c10d"] * 3


def address_space():
    """Bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_address_space(more):
    """ulimit -v: so many bytes more than now."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + more,) * 2)


def test_a_communicator_maps_little_of_its_peers_memory():
    def body(rank, world):
        Communicator(transport="shm").close()
        before = address_space()
        own = min(os.sysconf("SC_PHYS_PAGES") * resource.getpagesize(), 256 << 30)
        comms = [Communicator(transport="shm") for _ in range(100)]
        assert address_space() - before < 100 * (own + world * (8 << 20))
        x = comms[-1].empty(1000)
        comms[-1].all_reduce(x)

    run_ranks(body, 4)


@pytest.mark.parametrize("order", ["growing", "falling"])
def test_memory_of_peers_is_reached_wherever_it_lies(order):
    def body(rank, world):
        with Communicator(transport="shm") as comm:
            numels = [3000 * 4**power for power in range(7)]  # up to 48 MiB
            kept = []
            for numel in numels if order == "growing" else reversed(numels):
                x = comm.empty(numel)
                x.copy_(torch.arange(numel) % 1000 + rank)
                kept.append(comm.all_reduce(x))
                output = comm.empty(numel * world)
                comm.all_gather(output, x)
                kept.append(output[rank * numel : (rank + 1) * numel])
            for x in kept:
                assert torch.equal(x, torch.arange(len(x)) % 1000 * world + float(sum(range(world))))

    run_ranks(body, 3)


def test_under_a_limit_of_address_space_shared_memory_is_used_as_long_as_there_is_some():
    def body(rank, world):
        limit_address_space(4 << 30)
        comms = [Communicator() for _ in range(40)]
        kinds = [comm.transport for comm in comms]
        for comm in comms:
            x = torch.ones(1000)
            comm.all_reduce(x)
            assert (x == world).all()
        raises(TransportUnavailable, "could not make shared memory", lambda: Communicator(transport="shm"))
        return kinds

    first, *others = run_ranks(body, 3)
    assert all(kinds == first for kinds in others)
    assert first == sorted(first, reverse=True)
    assert first[0] == "shm"
    assert first[-1] == "c10d"


def test_memory_of_a_peer_that_there_is_no_address_space_for_fails_every_rank():
    def body(rank, world):
        comm = Communicator(transport="shm", timeout=20)
        x = comm.empty(64 << 20)
        if rank == 1:
            limit_address_space(32 << 20)
        raises(PeerFailed, "rank 1 failed: mapping .* shared memory", lambda: comm.all_reduce(x))
        raises(PeerFailed, "dead since an earlier operation: rank 1", comm.barrier)

    run_ranks(body, 2)
