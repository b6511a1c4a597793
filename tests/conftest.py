"""Ranks are forked from this process (ranks.py), so it stays single-threaded: a forked OpenMP pool hangs."""

import os
import shutil
import signal

os.environ["OMP_NUM_THREADS"] = "1"

# Ignored where the suite runs in the background of a shell, and then in every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

# Imported by the first forward of stock DDP: once here, not in each forked rank.
import torch._dynamo

torch.set_num_threads(1)


@pytest.fixture
def nothing_is_left_behind():
    """No process, memfd, name in /dev/shm or file: as much after the test as before."""
    from programs import assert_nothing_left, own_footprint
    from ranks import run_ranks

    run_ranks(lambda rank, world: None, 1)  # what torch makes once for the process
    before = own_footprint()
    yield
    assert_nothing_left(before)


@pytest.fixture
def fake_cuda():
    """The stand-in for the CUDA driver, fresh; a test that leaves an error in it fails."""
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler to build the stand-in for the CUDA driver with")
    from fake_cuda.control import loaded

    control = loaded()
    control.reset()
    yield control
    control.drain()
    errors = control.errors()
    control.reset()
    assert not errors


def pytest_configure(config):
    """GPUCOMM_TEST_DEVICE=fake_cuda: every rank's tensors are on a GPU, the stand-in (`make test-fake-gpu`)."""
    if os.environ.get("GPUCOMM_TEST_DEVICE") == "fake_cuda":
        import ranks
        from fake_cuda.control import loaded
        from fake_cuda.ranks import on_gpu_whatever_transport

        loaded()
        ranks.around = on_gpu_whatever_transport


def pytest_collection_modifyitems(items):
    if os.environ.get("GPUCOMM_TEST_DEVICE") == "fake_cuda":
        from fake_cuda.differences import reason

        for item in items:
            if (text := reason(item.name)) is not None:
                item.add_marker(pytest.mark.skip(reason=text))
