"""A rank of gpucomm's own whose GPU is the stand-in: its CPU tensors are on a device, and NCCL is the stand-in too."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from fake_cuda.control import Control, loaded
from fake_cuda.nccl import USUAL, Nccl
from fake_cuda.shim import CudaShim, _range
from torch.utils._python_dispatch import _disable_current_modes

from gpucomm import _core, cuda

_DLPACK_CPU = 1


class StandIn(cuda.TorchCuda):
    """What gpucomm asks of torch about GPUs, answered for CPU tensors in the shim's mode."""

    asks_driver = True

    def __init__(self, shim: CudaShim, ordinal: int) -> None:
        self.shim = shim
        self._ordinal = ordinal

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def ordinal(self, device: torch.device) -> int:
        return self._ordinal

    def current_device(self) -> int:
        return self._ordinal

    def current_stream(self, ordinal: int) -> Callable[[], int]:
        return lambda: self.shim.current

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        self.shim.record_stream(tensor, stream)

    def tensor_over(self, memory: _core.Memory, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        capsule = memory.dlpack(str(dtype).removeprefix("torch."), numel, _DLPACK_CPU, 0)
        return torch.utils.dlpack.from_dlpack(capsule)

    def host(self) -> AbstractContextManager:
        return _disable_current_modes()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        self.shim.synchronize()
        with self.host():
            tensor = tensor.contiguous()
            self.shim.control.host_access(*_range(tensor), False, "copy to the host")
            copy = (ctypes.c_byte * tensor.nbytes).from_buffer_copy(
                (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
            )
            return torch.frombuffer(copy, dtype=tensor.dtype).view(tensor.shape)


@contextmanager
def on_gpu(
    rank: int, world: int, *, version: int = USUAL, order: str = "random", seed: int = 0, script: str = ""
) -> Iterator[CudaShim]:
    """In the process of a rank: it has a GPU of its own, and torch's tensors are there. Errors left fail the test."""
    control: Control = loaded()
    control.reset()
    control.machine(device_count=world)
    control.deadline(30)
    control.order(order, seed + rank)
    control.drive_when_idle(
        0.05
    )  # a host that waits for a peer does not drive its own streams, which that one waits for
    nccl = Nccl(control, version)
    nccl.reset()
    nccl.script(script)
    os.environ["GPUCOMM_CUDA_LIBRARY"] = str(control.path)
    os.environ["GPUCOMM_NCCL_LIBRARY"] = nccl.library._name
    shim = CudaShim(control, rank)
    shim.nccl = nccl
    before, cuda.gpu = cuda.gpu, StandIn(shim, rank)
    try:
        with shim:
            yield shim
            shim.synchronize()
        errors = control.errors()
        assert errors == [], errors
    finally:
        cuda.gpu = before


@contextmanager
def on_gpu_whatever_transport(rank: int, world: int) -> Iterator[None]:
    """For tests that were written for the CPU: a transport that they name is what the hosts tell each other by."""
    from gpucomm import communicator
    from gpucomm.ddp import construction

    over = communicator.Communicator.over

    def named_for_the_hosts(transport: Any, *args: Any) -> Any:
        made = over(transport, *args)
        made.transport = transport.name()
        return made

    with (
        mock.patch.object(construction, "check_gpu_transport", return_value=None),
        mock.patch.object(communicator.Communicator, "over", named_for_the_hosts),
        on_gpu(rank, world),
    ):
        yield
