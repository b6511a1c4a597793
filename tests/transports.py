"""Which transports the suites are run over: those of the CPU, or with tensors on a GPU (`make test-fake-gpu`) NCCL."""

import os

import pytest

on_gpu = os.environ.get("GPUCOMM_TEST_DEVICE") == "fake_cuda"

TRANSPORTS = ("nccl",) if on_gpu else ("shm", "c10d", "loopback")

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
