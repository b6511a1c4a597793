"""What a GPU has to do, on a real one (mark `gpu`), and the same tests over its stand-in wherever there is none."""

import copy
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import kernel_checks
import pytest
import torch
from gpu.device import gpu_of
from gpu.launch import load_kernels
from gpu.place import Place
from ranks import run_ranks
from toys import batch, mlp

from gpucomm import Communicator, NonFinite, _core, cuda, libraries
from gpucomm import DistributedDataParallel as Ours
from gpucomm.errors import TransportUnavailable


@cache
def has_gpu():
    """Asked in another process: one that has asked cannot fork ranks which use it."""
    if torch.version.cuda is None:
        return False
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100).returncode == 0


@pytest.fixture(params=["stand_in", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Each test's own process has it: see run()."""
    if request.param == "stand_in":
        request.getfixturevalue("fake_cuda")  # built before ranks are forked; skips where there is no compiler
    elif not has_gpu():
        pytest.skip(f"torch {torch.__version__} has no GPU here")
    return request.param


@contextmanager
def on(device):
    with gpu_of(Place(0, 1, Path(), device == "stand_in", 0.0)) as gpu:
        yield gpu
        gpu.synchronize()


def run(device, body):
    """body(gpu) in a process of its own, at world size 1."""

    def within(rank, world):
        with on(device) as gpu:
            body(gpu)

    backend = "gloo" if device == "stand_in" else "cpu:gloo,cuda:nccl"
    run_ranks(within, 1, backend=backend, timeout_s=100)


def loss_of(model, gpu, iteration):
    return model(batch(0, iteration, 5, 24).to(gpu.torch_device)).square().mean()


def expected_gradients(model, gpu, iteration):
    """Of a plain copy: at world size 1 the means are these."""
    plain = copy.deepcopy(model)
    loss_of(plain, gpu, iteration).backward()
    return [param.grad for param in plain.parameters()]


def assert_gradients(model, expected, **tolerance):
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, **tolerance)


@pytest.mark.parametrize("check", kernel_checks.CHECKS, ids=lambda check: check.__name__)
def test_of_the_kernels(device, check):
    run(device, lambda gpu: check(gpu.torch_device, load_kernels()))


def test_kernels_compiled_at_run_time_pack_as_torch_does(device):
    def body(gpu):
        capability = _core.GpuDevice(0).compute_capability
        image, origin = _core.cuda_compile_kernels(compiler["path"], capability)
        assert origin.startswith("compiled by NVRTC")
        kernels = load_kernels(image)
        kernel_checks.many_gradients_take_several_launches(gpu.torch_device, kernels)
        kernel_checks.norms_are_those_of_float64(gpu.torch_device, kernels)

    try:
        compiler = _core.nvrtc_load("", libraries.nvrtc_wheels())
    except TransportUnavailable as missing:
        pytest.skip(str(missing))
    run(device, body)


def test_arguments_of_another_size_are_refused(device):
    def body(gpu):
        with pytest.raises(ValueError, match="pack_f32_f32: arguments of 3 bytes, expected 40"):
            _core.cuda_launch_kernel(load_kernels(), "pack_f32_f32", 1, b"abc", 0)

    run(device, body)


def test_gradients_are_those_of_the_plain_module(device):
    def body(gpu):
        model = mlp().to(gpu.torch_device)
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)
        assert ours.transport == "nccl"
        for iteration in range(4):
            ours.zero_grad()
            loss_of(ours, gpu, iteration).backward()
            assert_gradients(ours, expected_gradients(model, gpu, iteration), rtol=0, atol=0)

    run(device, body)


def test_gradients_accumulate_without_and_then_with_a_reduction(device):
    def body(gpu):
        model = mlp().to(gpu.torch_device)
        ours = Ours(copy.deepcopy(model))
        for _ in range(2):
            ours.zero_grad()
            with ours.no_sync():
                loss_of(ours, gpu, 0).backward()
            loss_of(ours, gpu, 1).backward()
            pairs = zip(expected_gradients(model, gpu, 0), expected_gradients(model, gpu, 1), strict=True)
            assert_gradients(ours, [a + b for a, b in pairs])

    run(device, body)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
def test_gradients_travel_in_16_bits(device, wire_dtype):
    def body(gpu):
        model = mlp().to(gpu.torch_device)
        ours = Ours(copy.deepcopy(model), wire_dtype=wire_dtype)
        for iteration in range(2):
            ours.zero_grad()
            loss_of(ours, gpu, iteration).backward()
            expected = [grad.to(wire_dtype).float() for grad in expected_gradients(model, gpu, iteration)]
            assert_gradients(ours, expected, rtol=0, atol=0)

    run(device, body)


def test_a_gradient_that_is_not_finite_is_named(device):
    def body(gpu):
        ours = Ours(mlp().to(gpu.torch_device), nonfinite="raise")
        loss_of(ours, gpu, 0).backward()
        ours.zero_grad()
        with pytest.raises(NonFinite, match="on rank 0"):
            (loss_of(ours, gpu, 1) * float("nan")).backward()
        ours.zero_grad()
        loss_of(ours, gpu, 2).backward()
        assert all(bool(param.grad.isfinite().all()) for param in ours.parameters())

    run(device, body)


def test_a_forward_and_backward_on_another_stream_are_ordered_with_what_follows(device):
    def body(gpu):
        model = mlp().to(gpu.torch_device)
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)
        for iteration in range(4):
            ours.zero_grad()
            with gpu.side_stream():
                loss_of(ours, gpu, iteration).backward()
            assert_gradients(ours, expected_gradients(model, gpu, iteration))

    run(device, body)


def test_a_forward_on_another_stream_than_its_backward_is_ordered(device):
    def body(gpu):
        model = mlp().to(gpu.torch_device)
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)
        for iteration in range(4):
            ours.zero_grad()
            with gpu.side_stream():
                loss = loss_of(ours, gpu, iteration)
            loss.backward()
            assert_gradients(ours, expected_gradients(model, gpu, iteration))

    run(device, body)


def test_memory_of_fresh_gradients_is_not_used_again_before_they_are_packed(device):
    """They are let go while the host runs ahead; what is allocated at once after that takes their place."""

    def body(gpu):
        model = mlp(width=24).to(gpu.torch_device)
        ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)
        for iteration in range(6):
            ours.zero_grad()
            with gpu.side_stream():
                loss_of(ours, gpu, iteration).backward()
                for param in ours.parameters():
                    torch.full_like(param, float("nan"))
            assert_gradients(ours, expected_gradients(model, gpu, iteration))

    run(device, body)


def test_an_iteration_is_captured_as_a_graph_between_others(device):
    """Before it, replayed, and after it: all give the same gradients."""

    def body(gpu):
        model = mlp().to(gpu.torch_device)
        inputs = batch(0, 0, 5, 24).to(gpu.torch_device)
        expected = expected_gradients(model, gpu, 0)

        def iteration():
            ours.zero_grad(set_to_none=True)
            ours(inputs).square().mean().backward()

        with gpu.side_stream():
            ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)
            for _ in range(3):
                iteration()
        gpu.synchronize()
        replay, _ = gpu.captured(iteration)
        for work in (replay, replay, iteration, replay, iteration):
            for param in ours.parameters():
                param.grad.fill_(float("nan"))
            work()
            assert_gradients(ours, expected)

    run(device, body)


def test_clipping_is_captured_too(device):
    def body(gpu):
        model = mlp().to(gpu.torch_device)
        inputs = batch(0, 0, 5, 24).to(gpu.torch_device)
        expected = expected_gradients(model, gpu, 0)
        norm = torch.nn.utils.get_total_norm(expected)

        def iteration():
            ours.zero_grad(set_to_none=True)
            ours(inputs).square().mean().backward()
            ours.clip_grad_norm_(float(norm) / 2)

        with gpu.side_stream():
            ours = Ours(copy.deepcopy(model), bucket_cap_mb=0.001)
            for _ in range(3):
                iteration()
        gpu.synchronize()
        replay, _ = gpu.captured(iteration)
        for work in (replay, replay, iteration, replay):
            work()
            assert_gradients(ours, [grad / 2 for grad in expected])

    run(device, body)


def test_what_the_host_waits_for_cannot_be_captured(device):
    def body(gpu):
        with gpu.side_stream():
            ours = Ours(mlp().to(gpu.torch_device), nonfinite="raise")
            loss_of(ours, gpu, 0).backward()
        with pytest.raises(RuntimeError, match="cannot be captured: nonfinite='raise' has the host read"):
            gpu.captured(lambda: loss_of(ours, gpu, 1).backward())

    run(device, body)


class Foreign:
    """An array of a library that knows no DLPack, over a tensor's memory."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class OfDlpack:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def test_arrays_of_any_library_are_reduced_in_place(device):
    def body(gpu):
        with Communicator(transport="nccl") as comm:
            assert comm.transport == "nccl"
            x = torch.arange(6.0, device=gpu.torch_device)
            assert comm.all_reduce(x, "avg") is x
            for foreign in (Foreign(x), OfDlpack(x)):
                assert comm.all_reduce(foreign) is foreign
            work = comm.all_reduce(x, async_op=True)
            work.wait()
            assert torch.equal(x, torch.arange(6.0, device=gpu.torch_device))
            comm.broadcast(y := torch.full((3,), 2.5, dtype=torch.bfloat16, device=gpu.torch_device))
            gathered = torch.empty_like(y)
            comm.all_gather(gathered, y)
            assert torch.equal(gathered, y)
            comm.all_reduce(z := torch.full((5,), 1 + 2j, device=gpu.torch_device))
            assert torch.equal(z, torch.full((5,), 1 + 2j, device=gpu.torch_device))

    run(device, body)


@pytest.mark.gpu
def test_arrays_of_cupy_are_reduced_in_place():
    cupy = pytest.importorskip("cupy")
    if not has_gpu():
        pytest.skip("no GPU")

    def body(gpu):
        with Communicator(transport="nccl") as comm:
            x = cupy.arange(6, dtype=cupy.float32)
            assert comm.all_reduce(x) is x
            assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    run("gpu", body)


def test_the_default_stream_is_recorded_as_itself():
    tensor, streams = mock.Mock(), mock.Mock()
    with (
        mock.patch.object(torch.cuda, "default_stream", streams.default),
        mock.patch.object(torch.cuda, "ExternalStream", streams.external),
    ):
        cuda.TorchCuda().record_stream(tensor, 0)
        cuda.TorchCuda().record_stream(tensor, 1234)
    assert tensor.record_stream.call_args_list == [mock.call(streams.default()), mock.call(streams.external())]
    assert streams.default.call_args_list[0] == mock.call(tensor.device)
    assert streams.external.call_args_list[0] == mock.call(1234, tensor.device)
