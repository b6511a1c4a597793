"""Programs for tests of failures, what they observe, and what must be left behind: nothing."""

import dataclasses
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from footprint import footprint

from gpucomm import Communicator, DistributedDataParallel
from gpucomm.errors import CommError

each_transport = pytest.mark.parametrize("transport", ["shm", "c10d"])


each_program = pytest.mark.parametrize("program", ["communicator", "training"])


class Communication:
    """Collectives of several sizes, again and again."""

    def __init__(self, transport, timeout=30):
        self.comm = Communicator(transport=transport, timeout=timeout)
        self.arrays = [self.comm.empty(50000), torch.ones(100000), torch.ones(3)]

    def iterate(self):
        for x in self.arrays:
            self.comm.all_reduce(x.fill_(1.0))


class FailingBackward(torch.autograd.Function):
    """The identity; backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FailingBackward.armed:
            raise ArithmeticError("this rank's backward failed")
        return grad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(60, 300)
        self.last = torch.nn.Linear(300, 10)

    def forward(self, x):
        return self.last(FailingBackward.apply(torch.relu(self.first(x))))


class Training:
    """A small model of several buckets, trained on other data on each rank."""

    def __init__(self, transport, timeout=30):
        self.ddp = DistributedDataParallel(Model(), transport=transport, timeout=timeout, bucket_cap_mb=0.01)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def backward(self):
        self.optimizer.zero_grad()
        self.ddp(torch.randn(8, 60, generator=self.data)).square().mean().backward()

    def iterate(self):
        self.backward()
        self.optimizer.step()

    def parameters(self):
        return [p.detach().clone() for p in self.ddp.parameters()]


PROGRAMS = {"communicator": Communication, "training": Training}


def seconds_since(key: str) -> float:
    """Since a rank called note_now(key). The clock is one for all processes of a machine."""
    return time.monotonic() - float(dist.distributed_c10d._get_default_store().get(key))


def note_now(key: str) -> None:
    dist.distributed_c10d._get_default_store().set(key, str(time.monotonic()))


def error_of(call, *args):
    """What the call raises, as text and attributes: the exception itself would keep memory alive."""
    try:
        call(*args)
    except BaseException as error:
        return type(error), str(error), {k: v for k, v in vars(error).items() if isinstance(v, (int, str, list))}
    raise AssertionError("nothing was raised")


def iterate_until_it_fails(running):
    while True:
        running.iterate()


def pids_of_all(world):
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    return pids


def assert_dead(running):
    """A broken program says so again, and its gradients are not applied."""
    with pytest.raises(CommError):
        running.iterate()
    if isinstance(running, Training):
        with pytest.raises(CommError):
            running.optimizer.step()


def own_footprint():
    """Without the entries of /dev/shm that other programs of the machine make."""
    found = footprint()
    return dataclasses.replace(found, shm_entries=frozenset(e for e in found.shm_entries if "gpucomm" in e))


def assert_nothing_left(before):
    gc.collect()
    grown = own_footprint().grown_since(before)
    assert grown == "", grown
