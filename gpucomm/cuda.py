"""Everything that touches torch.cuda: which tensors are on a GPU, the program's streams, device memory as tensors.

Kept small, for no test without a GPU runs it; tests put a stand-in in the place of `gpu`, whose tensors are the host's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from gpucomm import _core

_KDL_CUDA = 2  # DLPack's number for memory of a GPU


class TorchCuda:
    """What gpucomm asks of torch about GPUs. Devices by their ordinal, streams by the driver's handle."""

    # Whether the driver is to be asked about every array, whatever it says of itself.
    asks_driver = False

    def serves(self, device: torch.device) -> bool:
        """Whether this is a GPU that NCCL and the CUDA driver serve (on ROCm torch calls its devices cuda too)."""
        return device.type == "cuda" and torch.version.hip is None

    def ordinal(self, device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    def current_device(self) -> int | None:
        """The ordinal of the device that the program has chosen; None without a GPU."""
        return torch.cuda.current_device() if torch.cuda.is_available() and torch.version.hip is None else None

    def current_stream(self, ordinal: int) -> Callable[[], int]:
        """A function that gives the program's stream of the moment on a device, in a fraction of a microsecond."""
        return partial(torch._C._cuda_getCurrentRawStream, ordinal)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """The tensor's memory is not to be used again before what the stream does with it until now is done."""
        # The default stream's handle is 0, of which ExternalStream makes another stream, of torch's pool.
        default = stream == 0
        tensor.record_stream(
            torch.cuda.default_stream(tensor.device) if default else torch.cuda.ExternalStream(stream, tensor.device)
        )

    def tensor_over(self, memory: _core.Memory, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A flat tensor over a transport's device memory, which lives as long as the tensor does."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=f"cuda:{memory.device}")
        capsule = memory.dlpack(str(dtype).removeprefix("torch."), numel, _KDL_CUDA, memory.device)
        return torch.utils.dlpack.from_dlpack(capsule)

    def host(self) -> AbstractContextManager:
        """Within it tensors that are made without a device are the host's own, among ranks' hosts only."""
        return nullcontext()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, if it is in host memory; else a copy there, for which the host waits."""
        return tensor.cpu()


gpu = TorchCuda()


# ---- of this process, whoever uses its GPUs


def is_in_use() -> bool:
    """Whether this process has begun to use a GPU: one that is forked from it then cannot."""
    return torch.cuda.is_initialized()


def device_count() -> int:
    return torch.cuda.device_count()


def choose(ordinal: int) -> None:
    """Makes it the device that tensors are made on from now on, if only "cuda" is said."""
    torch.cuda.set_device(ordinal)


def generator_states() -> list[torch.Tensor] | None:
    """Of every GPU's generator of random numbers; None if none is in use."""
    return torch.cuda.get_rng_state_all() if is_in_use() else None


def restore_generators(states: list[torch.Tensor]) -> None:
    torch.cuda.set_rng_state_all(states)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself in host memory, or a copy there of one on a GPU, for which the host waits."""
    return gpu.on_host(tensor) if gpu.serves(tensor.device) else tensor
