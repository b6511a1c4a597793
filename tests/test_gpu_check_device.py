"""bench/gpu/device.py: what a dry run leaves out calls torch.cuda as torch declares it. No GPU is needed."""

import ast
import contextlib
import inspect
from unittest import mock

import pytest
import torch
from gpu import device
from gpu.device import Gpu

NAMES = [
    "CUDAGraph", "Event", "Stream", "current_stream", "empty_cache", "graph", "mem_get_info", "memory_reserved",
    "memory_stats", "reset_peak_memory_stats", "stream", "synchronize",
]  # fmt: skip


@pytest.fixture
def cuda(monkeypatch):
    """Every function and class of torch.cuda that Gpu calls, with torch's signatures and nothing behind them."""
    made = {name: mock.create_autospec(getattr(torch.cuda, name)) for name in NAMES}
    made["current_stream"].return_value = mock.create_autospec(torch.cuda.Stream, instance=True)
    for name, one in made.items():
        monkeypatch.setattr(torch.cuda, name, one)
    return made


def test_time_is_that_between_two_events(cuda):
    gpu = Gpu()
    first, last = gpu.mark(), gpu.mark()
    first.elapsed_time.return_value = 1.5
    assert gpu.us_between(first, last) == 1500
    last.synchronize.assert_called_once_with()
    assert cuda["Event"].call_args == mock.call(enable_timing=True)


def test_a_side_stream_waits_and_is_waited_for(cuda):
    side, current = cuda["Stream"].return_value, cuda["current_stream"].return_value
    with Gpu().side_stream():
        side.wait_stream.assert_called_once_with(current)
        current.wait_stream.assert_not_called()
    current.wait_stream.assert_called_once_with(side)
    cuda["stream"].assert_called_once_with(side)


def test_work_is_captured_once_and_replayed_as_often_as_asked(cuda):
    done = []
    replay, times = Gpu().captured(lambda: done.append(1))
    assert (done, times) == ([1], 0)
    cuda["graph"].assert_called_once_with(cuda["CUDAGraph"].return_value)
    replay()
    cuda["CUDAGraph"].return_value.replay.assert_called_once_with()


def test_memory_is_asked_of_torch_and_of_the_device(cuda):
    cuda["memory_stats"].return_value = {"allocated_bytes.all.peak": 10, "allocation.all.allocated": 3}
    cuda["mem_get_info"].return_value = (70, 100)
    cuda["memory_reserved"].return_value = 12
    found = Gpu().memory()
    assert (found.peak_bytes, found.made, found.other_bytes) == (10, 3, 18)
    Gpu().forget_peak()
    cuda["reset_peak_memory_stats"].assert_called_once_with()


def test_the_names_of_statistics_are_torchs():
    """As torch's own summary of them asks for them; without a GPU there are no statistics to look at."""

    class Asked(dict):
        def __missing__(self, name):
            return self.setdefault(name, 1)

    asked = Asked()
    with (
        mock.patch("torch.cuda.memory.memory_stats", autospec=True, return_value=asked),
        contextlib.suppress(KeyError),  # of what it takes without asking
    ):
        torch.cuda.memory_summary(0)
    assert {"allocated_bytes.all.peak", "allocation.all.allocated"} <= set(asked)


def test_everything_of_torch_cuda_that_is_called_is_held_against_torch_here():
    tree = ast.parse(inspect.getsource(device))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and ast.unparse(node.value) == "torch.cuda"
    }
    assert used - {"is_available", "set_device"} == set(NAMES)
