"""CPU tensors stand for CUDA ones: each torch op becomes work on the current stream of the stand-in.

Torch's own ops run at once, so before one does, what its stream was ordered after is run (and nothing else: whatever
the program forgot to order may still be outstanding, in values as well as in the clocks). Its reads and writes are
recorded from the op's schema: mutated arguments and fresh results are written, other tensors are read, views are no
access. A storage is allocated on the stream that is current at its first sight; its end is a write on that stream.

Backward of CPU tensors runs in the thread that called it, so the mode sees all of it; on which stream each of its ops
runs is decided as on CUDA (autograd_streams.py).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fake_cuda.autograd_streams import AutogradStreams
from fake_cuda.control import Control
from fake_cuda.program import Program
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their result is on the host, which waits for it.
_READ_BACK = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::_unique2",
}


def _reads_shapes_alone(name: str) -> bool:
    return name.endswith("_like") or name.startswith("aten::new_")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of what a strided tensor spans."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), span * tensor.element_size()


def _is_memory(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and not hasattr(value, "__tensor_flatten__")
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.numel() > 0
        and value.untyped_storage().nbytes() > 0
    )


class CudaShim(TorchDispatchMode):
    """Within it, and in this thread. The current stream is 0, the legacy one, at first."""

    def __init__(self, control: Control, device: int = 0) -> None:
        super().__init__()
        self.control = control
        self.program = Program(control, device)
        self._thread = threading.local()
        self._lock = threading.RLock()
        # By the storage's address: what ends it, and the other streams that use it.
        self._storages: dict[int, tuple[weakref.finalize, set[int]]] = {}
        self._count = 0

    def __enter__(self) -> CudaShim:
        self.program.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.control.drain()
        with self._lock:
            for address, (end, _) in self._storages.items():
                end.detach()
                self.control.forget(address)
            self._storages.clear()
        self.program.__exit__()

    # ---- streams

    @property
    def current(self) -> int:
        """In backward and its hooks, that of the node that runs, unless stream() has set another within it."""
        if self._chosen_in() is not torch._C._current_autograd_node():
            node_stream = self._autograd().current()
            if node_stream is not None:
                return node_stream
        return self._chosen()

    @contextmanager
    def stream(self, handle: int) -> Iterator[None]:
        """The current stream of this thread within, as torch.cuda.stream sets it."""
        before = self._chosen(), self._chosen_in()
        self._choose(handle, torch._C._current_autograd_node())
        try:
            yield
        finally:
            self._choose(*before)

    def _chosen(self) -> int:
        return getattr(self._thread, "chosen", 0)

    def _chosen_in(self) -> Any:
        """The node of autograd that ran when the stream was chosen."""
        return getattr(self._thread, "chosen_in", None)

    def _choose(self, handle: int, node: Any) -> None:
        self._thread.chosen, self._thread.chosen_in = handle, node
        self._autograd().switch(handle)

    def _autograd(self) -> AutogradStreams:
        if not hasattr(self._thread, "autograd"):
            self._thread.autograd = AutogradStreams(self.control.wait_stream)
        return self._thread.autograd

    def synchronize(self) -> None:
        """The host waits for the current stream."""
        self.control.synchronize(self.current)

    # ---- memory

    def adopt(self, *tensors: torch.Tensor, name: str = "") -> None:
        """Device memory from here on, for tensors that were made before; what was done with it is over."""
        for tensor in tensors:
            if _is_memory(tensor):
                self._know(tensor.untyped_storage(), name or "tensor", fresh=False)

    def record_stream(self, tensor: torch.Tensor, handle: int) -> None:
        """As torch.Tensor.record_stream: the memory is given back only after what that stream holds by then."""
        self._use(tensor.untyped_storage().data_ptr(), handle)

    def _use(self, address: int, handle: int) -> None:
        known = self._storages.get(address)
        if known is not None:
            known[1].add(handle)

    def _know(self, storage: torch.UntypedStorage, name: str, fresh: bool) -> None:
        address = storage.data_ptr()
        with self._lock:
            if address in self._storages or self.control.allocation(address) is not None:
                return
            self._count += 1
            label = f"{name} #{self._count}"
            if fresh:
                self.control.register(address, storage.nbytes(), label, self.current)
            else:
                self.control.adopt(address, storage.nbytes(), label)
            # Runs while the memory is still there.
            end = weakref.finalize(storage, self._end, address, self.current)
            end.atexit = False
            self._storages[address] = end, set()

    def _end(self, address: int, stream: int) -> None:
        # On whatever thread lets go of the memory last: one of a process group's, say, without a context of its own.
        with self._lock, self.program.current():
            _, used = self._storages.pop(address)
            self.control.unregister(address, stream, used)

    # ---- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # tensors that are made of others, as DTensor: the ops on those come next
        kwargs = kwargs or {}
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(filter(_is_memory, tree_leaves(value)))
        given = {tensor.untyped_storage().data_ptr() for tensor in reads + writes}
        self.adopt(*reads, *writes, name="tensor")
        name = func._schema.name
        current = self.current
        in_backward = torch._C._current_autograd_node() is not None
        if in_backward:
            for address in self._autograd().before_op(current, self._chosen(), given):
                self._use(address, current)
        if given:
            self.control.run_until(current)
        results = func(*args, **kwargs)
        fresh = [
            tensor
            for tensor in tree_leaves(results)
            if _is_memory(tensor) and tensor.untyped_storage().data_ptr() not in given
        ]
        for tensor in fresh:
            self._know(tensor.untyped_storage(), name, fresh=True)
        is_view = not fresh and not writes and name not in _READ_BACK and any(map(_is_memory, tree_leaves(results)))
        if not is_view and (given or fresh):
            written = {_range(tensor) for tensor in writes + fresh}
            read = set() if _reads_shapes_alone(name) else {_range(tensor) for tensor in reads} - written
            self.control.op(current, name, read, written)
        if in_backward:
            self._autograd().after_op(current, {tensor.untyped_storage().data_ptr() for tensor in writes + fresh})
        if name in _READ_BACK:
            self.synchronize()
        return results


def values(shim: CudaShim, tensor: torch.Tensor) -> list[float]:
    """A tensor's elements, read back as a program would: after its current stream."""
    shim.synchronize()
    shim.control.host_access(*_range(tensor), False, "read back")
    flat = (ctypes.c_byte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(bytearray(flat), dtype=tensor.dtype).tolist()
