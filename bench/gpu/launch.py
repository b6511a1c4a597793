"""The kernels of codec.cu, launched by themselves: their arguments as codec_args.h has them.

Everything but the launches themselves is made before: what is timed is what an iteration of the engine does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gpucomm import _core, cuda, libraries
from gpucomm.world import Settings, kernel_cache_folder

PIECE_NUMEL = 8192
POINTERS_PER_LAUNCH = 504
SLOT_ALIGNMENT = 16  # elements; slots start at multiples of it, as in the wrapper's plans
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}
MAX_FLAT_BLOCKS = 1024


class Piece(ctypes.Structure):
    _fields_ = [
        ("slot_offset", ctypes.c_uint64),
        ("grad_offset", ctypes.c_uint64),
        ("numel", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
    ]


class CodecArgs(ctypes.Structure):
    _fields_ = [
        ("bucket", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("partial_norms", ctypes.c_void_p),
        ("first_nonfinite", ctypes.c_void_p),
        ("device_scale", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("first_slot", ctypes.c_uint32),
        ("pointers", ctypes.c_void_p * POINTERS_PER_LAUNCH),
    ]


class FlatArgs(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("partials", ctypes.c_void_p),
        ("device_scale", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("partial_count", ctypes.c_uint32),
        ("result", ctypes.c_void_p),
    ]


def load_kernels(image: bytes | None = None) -> _core.CudaKernels:
    """Those of the first GPU, as gpucomm loads them, or of an image."""
    device = _core.GpuDevice(0, Settings.from_environment().cuda_library)
    if image is not None:
        return _core.cuda_kernels_of(device, image)
    return _core.CudaKernels(device, libraries.nvrtc_wheels(), kernel_cache_folder())


def current_stream() -> int:
    return cuda.gpu.current_stream(0)()


class Packing:
    """Gradients of one dtype and a bucket of their slots, of another dtype perhaps, with a launch for each 504 slots.

    skip: elements between the start of the bucket's memory and its first slot, to have it misaligned.
    """

    def __init__(
        self, kernels: _core.CudaKernels, grads: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0, skip: int = 0
    ) -> None:
        self.grads, self.dtype, self.scale = list(grads), dtype, scale
        self._kernels = kernels
        self.offsets, end = [], skip
        for grad in grads:
            self.offsets.append(end)
            end += -(-grad.numel() // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        device = grads[0].device
        self.bucket = torch.full((end,), -7.0, dtype=dtype, device=device)
        pieces, starts = self._make_pieces()
        upload = torch.frombuffer(bytearray(b"".join(map(bytes, pieces))), dtype=torch.uint8)
        self._pieces = upload.to(device, copy=True)
        self.partial_norms = torch.zeros(len(pieces), dtype=torch.float32, device=device)
        self.first_nonfinite = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device)
        self._launches = self._make_launches(starts)

    def _make_pieces(self) -> tuple[list[Piece], list[int]]:
        """And for each slot the number of its first piece; one more, for where the last one ends."""
        pieces: list[Piece] = []
        starts = [0]
        for slot, (grad, offset) in enumerate(zip(self.grads, self.offsets, strict=True)):
            for done in range(0, grad.numel(), PIECE_NUMEL):
                pieces.append(Piece(offset + done, done, min(PIECE_NUMEL, grad.numel() - done), slot))
            starts.append(len(pieces))
        return pieces, starts

    def _make_launches(self, starts: list[int]) -> list[tuple[int, bytes]]:
        """Blocks and arguments."""
        launches = []
        for begin in range(0, len(self.grads), POINTERS_PER_LAUNCH):
            end = min(begin + POINTERS_PER_LAUNCH, len(self.grads))
            args = CodecArgs(scale=self.scale, first_slot=begin)
            args.bucket = self.bucket.data_ptr()
            args.pieces = self._pieces.data_ptr() + starts[begin] * ctypes.sizeof(Piece)
            args.partial_norms = self.partial_norms.data_ptr() + starts[begin] * 4
            args.first_nonfinite = self.first_nonfinite.data_ptr()
            for i, grad in enumerate(self.grads[begin:end]):
                args.pointers[i] = grad.data_ptr()
            launches.append((starts[end] - starts[begin], bytes(args)))
        return launches

    def pack(self) -> None:
        self._launch(f"pack_{NAMES[self.grads[0].dtype]}_{NAMES[self.dtype]}")

    def unpack(self) -> None:
        """From the bucket into the gradients."""
        self._launch(f"unpack_{NAMES[self.dtype]}_{NAMES[self.grads[0].dtype]}")

    def _launch(self, kernel: str) -> None:
        stream = current_stream()
        for blocks, arguments in self._launches:
            _core.cuda_launch_kernel(self._kernels, kernel, blocks, arguments, stream)

    def slots(self) -> list[Tensor]:
        """Views of the bucket, one for each gradient."""
        pairs = zip(self.grads, self.offsets, strict=True)
        return [self.bucket[offset : offset + grad.numel()] for grad, offset in pairs]


def flat_blocks(numel: int) -> int:
    return min(max(1, -(-numel // PIECE_NUMEL)), MAX_FLAT_BLOCKS)


def squared_norm(kernels: _core.CudaKernels, x: Tensor) -> Tensor:
    """Of a contiguous tensor, by the two kernels for it: float32, of one element."""
    partials = torch.zeros(flat_blocks(x.numel()), dtype=torch.float32, device=x.device)
    args = FlatArgs(data=x.data_ptr(), numel=x.numel(), partials=partials.data_ptr(), scale=1.0)
    _launch_flat(kernels, f"squared_norm_{NAMES[x.dtype]}", partials.numel(), args)
    return sum_of(kernels, partials)


def sum_of(kernels: _core.CudaKernels, partials: Tensor) -> Tensor:
    result = torch.zeros(1, dtype=torch.float32, device=partials.device)
    args = FlatArgs(partials=partials.data_ptr(), partial_count=partials.numel(), result=result.data_ptr())
    _launch_flat(kernels, "sum_partials", 1, args)
    return result


def scale(kernels: _core.CudaKernels, x: Tensor, factor: float, device_scale: Tensor | None = None) -> None:
    """x *= factor * device_scale."""
    by = 0 if device_scale is None else device_scale.data_ptr()
    args = FlatArgs(data=x.data_ptr(), numel=x.numel(), scale=factor, device_scale=by)
    _launch_flat(kernels, f"scale_{NAMES[x.dtype]}", flat_blocks(x.numel()), args)


def _launch_flat(kernels: _core.CudaKernels, name: str, blocks: int, args: FlatArgs) -> None:
    _core.cuda_launch_kernel(kernels, name, blocks, bytes(args), current_stream())
