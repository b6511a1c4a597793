"""The wire: in which dtype gradients travel, and in whose memory, where that is another than their own.

A gradient is cast while it is packed and cast back while it is unpacked, into memory of its own: so such a parameter
takes the room of its gradient and of its slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gpucomm.world import WIRE_DTYPES


@dataclass(frozen=True)
class Wire:
    """How gradients travel. The default: each in its own dtype, in place.

    travels: the dtype in a bucket for each dtype of gradients that is cast. apart: all gradients are unpacked beside
    the buckets, whose memory is then nobody's but the transport's. comes: a dtype in which gradients of
    wider parameters come from autograd (mixed precision computes in it), besides the parameters' own.
    """

    travels: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    comes: torch.dtype | None = None
    apart: bool = False

    def dtype_of(self, tensor_dtype: torch.dtype) -> torch.dtype | None:
        """In which gradients of this dtype travel beside the gradient itself; None: it is the gradient that travels."""
        found = self.travels.get(tensor_dtype, tensor_dtype)
        if found == tensor_dtype and not self.apart:
            return None
        return found.to_real() if found.is_complex else found

    def __str__(self) -> str:
        casts = [f"{dtype} as {wire}" for dtype, wire in self.travels.items()]
        return ", ".join([*casts, *(["buckets apart from gradients"] if self.apart else [])])

    def takes(self, grad_dtype: torch.dtype, tensor_dtype: torch.dtype) -> bool:
        """Whether a gradient of the first dtype can be packed for a parameter of the second."""
        return grad_dtype == tensor_dtype or (grad_dtype == self.comes and tensor_dtype.is_floating_point)


def narrow_wire(dtype: torch.dtype | None) -> Wire:
    """fp32 gradients travel as `dtype`, all others as they are."""
    return Wire() if dtype is None else Wire({torch.float32: dtype})


def check_wire_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype. Raises ValueError for one that is not accepted."""
    if dtype is not None and dtype not in WIRE_DTYPES.values():
        raise ValueError(
            f"wire_dtype is {dtype!r}, accepted are None, torch.bfloat16 and torch.float16, not names of them"
        )
    return dtype


def refuse_beside_hooks(wire: Wire) -> None:
    """Raises RuntimeError if gradients are cast: a communication hook decides by itself in which form they travel."""
    if wire.apart:
        raise RuntimeError(
            "a communication hook beside NcclOptions(register_buffers=True): only NCCL reduces buckets that it knows "
            "of, use one or the other"
        )
    if wire.travels or wire.comes is not None:
        raise RuntimeError(
            f"a communication hook beside wire_dtype= or mixed_precision= ({wire}): a hook decides itself in what form "
            "gradients travel, use one or the other (variable GPUCOMM_WIRE_DTYPE included)"
        )
