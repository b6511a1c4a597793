"""The plan, which slots lie in which bucket and in what order, and the memory and views that come from it."""

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from gpucomm import _core
from gpucomm.reduction.layout.local import local_of
from gpucomm.reduction.layout.wire import Wire
from gpucomm.transport import flat_tensor

MIB = 1 << 20
# Slots start at multiples of this many elements (at least 32 bytes), so the size of a bucket does not depend on order.
SLOT_ALIGNMENT = 16
_AS_THEY_ARE = Wire()


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as planning sees it: what its gradient is like. strides: in elements, those of a dense tensor.

    Of a distributed parameter it is its local part. wire_dtype: see Wire.dtype_of.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    tensor_dtype: torch.dtype
    wire_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, param: torch.Tensor, wire: Wire = _AS_THEY_ARE) -> "ParameterSpec":
        local = local_of(param)
        strides = local.stride() if is_dense(local) else contiguous_strides(local.shape)
        dtype = getattr(param, "grad_dtype", None) or local.dtype  # torch 2.10 and later; None: of any
        return cls(local.shape, tuple(strides), dtype, wire.dtype_of(dtype))

    def is_like(self, other: "ParameterSpec") -> bool:
        """Whether gradients of both fit one view; strides, in which ranks may differ, do not matter for that."""
        return (self.shape, self.tensor_dtype) == (other.shape, other.tensor_dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements in a bucket: a complex number is a pair of real ones there."""
        if self.wire_dtype is not None:
            return self.wire_dtype
        return self.tensor_dtype.to_real() if self.tensor_dtype.is_complex else self.tensor_dtype

    @property
    def numel(self) -> int:
        return self.shape.numel() * (2 if self.tensor_dtype.is_complex else 1)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """A tensor like the gradient, `offset` real elements of its dtype into the storage."""
        # Made with set_, not as an autograd view, so that detach_() works on a gradient.
        at = offset // (2 if self.tensor_dtype.is_complex else 1)
        return torch.empty(0, dtype=self.tensor_dtype, device=storage.device).set_(
            storage, at, self.shape, self.strides
        )


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket. offset, numel: in elements of the bucket's dtype."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Slots that are reduced together. dtype: torch's name, without "torch."; numel: padding included."""

    dtype: str
    numel: int
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which every rank launches them."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def build(
        cls,
        specs: Sequence[ParameterSpec],
        order: Iterable[int],
        caps: Sequence[int],
        alignment: int = SLOT_ALIGNMENT,
    ) -> "BucketPlan":
        """Fills buckets, one open for each dtype, with parameters in the given order; a full one is closed.

        The n-th bucket of a dtype is full once it holds at least caps[n] bytes of gradients (the last cap repeats), so
        a parameter larger than the cap closes one. Parameters without elements get a slot of size 0. alignment: slots
        start at multiples of so many elements.
        """
        closed: list[Bucket] = []
        opened: dict[torch.dtype, list[int]] = {}
        nbytes: dict[torch.dtype, int] = {}
        count: dict[torch.dtype, int] = {}

        def close(dtype: torch.dtype) -> None:
            slots, end = [], 0
            for parameter in opened.pop(dtype):
                numel = specs[parameter].numel
                slots.append(Slot(parameter, end, numel))
                end += -(-numel // alignment) * alignment
            closed.append(Bucket(str(specs[slots[0].parameter].dtype).removeprefix("torch."), end, tuple(slots)))
            count[dtype] = count.get(dtype, 0) + 1
            nbytes[dtype] = 0

        for parameter in order:
            spec = specs[parameter]
            opened.setdefault(spec.tensor_dtype, []).append(parameter)
            nbytes[spec.tensor_dtype] = nbytes.get(spec.tensor_dtype, 0) + spec.nbytes
            if nbytes[spec.tensor_dtype] >= caps[min(count.get(spec.tensor_dtype, 0), len(caps) - 1)]:
                close(spec.tensor_dtype)
        for dtype in list(opened):
            close(dtype)
        return cls(tuple(closed))

    def check(self, specs: Sequence[ParameterSpec], needed: Iterable[int]) -> None:
        """Raises ValueError unless this is a plan for these parameters in which all that are needed have one slot."""
        seen = set()
        for bucket in self.buckets:
            end = 0
            for slot in bucket.slots:
                if slot.parameter in seen or not 0 <= slot.parameter < len(specs):
                    raise ValueError(f"plan: parameter {slot.parameter} is there twice or not one of {len(specs)}")
                spec = specs[slot.parameter]
                if (slot.numel, bucket.dtype) != (spec.numel, str(spec.dtype).removeprefix("torch.")):
                    raise ValueError(
                        f"plan: parameter {slot.parameter} has {slot.numel} elements of {bucket.dtype}, in the model "
                        f"{spec.numel} of {spec.dtype}"
                    )
                if slot.offset % SLOT_ALIGNMENT or slot.offset < end:
                    raise ValueError(
                        f"plan: parameter {slot.parameter} lies at {slot.offset}, unaligned or overlapping"
                    )
                end = slot.offset + slot.numel
                seen.add(slot.parameter)
            if end > bucket.numel:
                raise ValueError(f"plan: a bucket of {bucket.numel} elements has slots up to {end}")
        if lacking := set(needed) - seen:
            raise ValueError(f"plan: no slot for parameters {sorted(lacking)}")

    @property
    def parameters(self) -> list[int]:
        """In launch order."""
        return [slot.parameter for bucket in self.buckets for slot in bucket.slots]

    @property
    def layout_hash(self) -> int:
        """64 bits over everything that ranks must have in common to reduce each other's buckets."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "little")

    def to_json(self) -> str:
        return json.dumps([asdict(bucket) for bucket in self.buckets])

    @classmethod
    def from_json(cls, text: str) -> "BucketPlan":
        """Raises ValueError for what to_json did not write."""
        try:
            buckets = json.loads(text)
            if not isinstance(buckets, list):
                raise TypeError("not a list")
            return cls(
                tuple(
                    Bucket(bucket["dtype"], bucket["numel"], tuple(Slot(**slot) for slot in bucket["slots"]))
                    for bucket in buckets
                )
            )
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"not a bucket plan: {error}") from error


def count_in_memory(storage_address: int) -> int:
    """References to a storage, read from the object itself: their number comes after the pointer to its vtable."""
    return ctypes.c_uint32.from_address(storage_address + ctypes.sizeof(ctypes.c_void_p)).value


def _use_count_function() -> Callable[[int], int]:
    # torch 2.6 and 2.7 have it in builds with CUDA only.
    function: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", count_in_memory)
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    alone = function(address)
    shared = tensor.detach()
    if function(address) != alone + 1:
        raise ImportError(f"torch {torch.__version__} counts references to storages in a way unknown to gpucomm")
    del shared
    return function


use_count = _use_count_function()


class BucketMemory:
    """The memory of one bucket and the views of its gradients, each shaped and strided like its parameter.

    A gradient lies in its slot, or, if it travels in another dtype, in memory of its own beside it: the parameters in
    `unpacked`.
    """

    def __init__(self, bucket: Bucket, memory: _core.Memory, specs: Sequence[ParameterSpec]) -> None:
        self.memory = memory
        self.flat = flat_tensor(memory, getattr(torch, bucket.dtype), bucket.numel)
        self.unpacked = [slot.parameter for slot in bucket.slots if specs[slot.parameter].wire_dtype is not None]
        apart = set(self.unpacked)
        self.views = {
            slot.parameter: specs[slot.parameter].view(self.flat.untyped_storage(), slot.offset)
            for slot in bucket.slots
            if slot.parameter not in apart
        }
        self.in_slots = bool(self.views)
        self._unpacked_flats: list[torch.Tensor] = []
        for dtype in sorted({specs[parameter].tensor_dtype for parameter in self.unpacked}, key=str):
            self._add_unpacked(dtype, specs)
        self._storages = [flat.untyped_storage() for flat in (self.flat, *self._unpacked_flats)]
        self.count_uses()

    def _add_unpacked(self, dtype: torch.dtype, specs: Sequence[ParameterSpec]) -> None:
        members = [parameter for parameter in self.unpacked if specs[parameter].tensor_dtype == dtype]
        starts, end = [], 0
        for parameter in members:
            starts.append(end)
            end += -(-specs[parameter].numel // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        flat = torch.zeros(end, dtype=dtype, device=self.flat.device)
        for parameter, start in zip(members, starts, strict=True):
            self.views[parameter] = specs[parameter].view(flat.untyped_storage(), start)
        self._unpacked_flats.append(flat)

    @property
    def gradient_flats(self) -> list[torch.Tensor]:
        """All gradients of the bucket, with zeros between them."""
        return [self.flat] if self.in_slots else self._unpacked_flats

    def scale(self, factor: float) -> None:
        """Multiplies the gradients, where they lie."""
        for flat in self.gradient_flats:
            if flat.is_floating_point():
                flat.mul_(factor)

    def count_uses(self) -> None:
        """All tensors that lie in this memory now are ours."""
        self._uses = [use_count(storage._cdata) for storage in self._storages]

    def aliased(self) -> bool:
        """True if a tensor besides ours lies in this memory: somebody keeps (part of) a gradient."""
        return any(use_count(storage._cdata) > uses for storage, uses in zip(self._storages, self._uses, strict=True))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(x: torch.Tensor) -> bool:
    """True if the elements fill one gapless stretch of memory, in whatever order of dimensions."""
    return torch.ops.aten.is_non_overlapping_and_dense(x)
