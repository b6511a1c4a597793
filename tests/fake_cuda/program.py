"""A program that uses the driver, for tests of the stand-in itself: the calls of libcuda that it needs, from Python."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fake_cuda.control import Control, Range

NON_BLOCKING = 1
BLOCKING = 0
WITHOUT_TIMING = 2


_Step = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
_Drop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Task(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("step", _Step),
        ("drop", _Drop),
        ("self", ctypes.c_void_p),
        ("ranges", ctypes.POINTER(Range)),
        ("range_count", ctypes.c_size_t),
    ]


class DriverError(Exception):
    def __init__(self, symbol: str, result: int) -> None:
        super().__init__(f"{symbol} returned {result}")
        self.result = result


class Program:
    """Within it the primary context of a device is current on this thread. Handles and addresses are integers."""

    def __init__(self, control: Control, device: int = 0) -> None:
        self.control = control
        self.device = device
        self.functions: dict[str, int] = {}
        self._callbacks: list[object] = []  # which tasks call as long as they are pending

    def __enter__(self) -> Program:
        self.call("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context))
        return self

    def __exit__(self, *_: object) -> None:
        self.call("cuCtxPopCurrent_v2", None)
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The same context, current on whatever thread calls."""
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", None)

    def call(self, symbol: str, *arguments: object) -> None:
        result = getattr(self.control.library, symbol)(*arguments)
        if result:
            raise DriverError(symbol, result)

    def made(self, symbol: str, *arguments: object) -> int:
        """What a function puts where its first argument points."""
        handle = ctypes.c_void_p()
        self.call(symbol, ctypes.byref(handle), *arguments)
        return handle.value or 0

    # ---- streams and events

    def stream(self, name: str = "", flags: int = NON_BLOCKING) -> int:
        handle = self.made("cuStreamCreateWithPriority", flags, 0)
        if name:
            self.control.name_stream(handle, name)
        return handle

    def event(self, flags: int = WITHOUT_TIMING) -> int:
        return self.made("cuEventCreate", flags)

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def order(self, first: int, then: int) -> None:
        """What comes on `then` is after what is on `first`."""
        event = self.event()
        self.record(event, first)
        self.wait(then, event)
        self.call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def is_complete(self, event: int) -> bool:
        return self._query("cuEventQuery", event)

    def is_idle(self, stream: int) -> bool:
        return self._query("cuStreamQuery", stream)

    def _query(self, symbol: str, handle: int) -> bool:
        try:
            self.call(symbol, ctypes.c_void_p(handle))
        except DriverError as error:
            if error.result != 600:
                raise
            return False
        return True

    # ---- memory

    def allocate(self, numel: int, name: str = "") -> int:
        """Of floats."""
        address = self.made("cuMemAlloc_v2", ctypes.c_size_t(4 * numel))
        if name:
            self.control.name_memory(address, name)
        return address

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_ulonglong(address))

    def copy(self, to: int, source: int, numel: int, stream: int) -> None:
        arguments = (
            ctypes.c_ulonglong(to),
            ctypes.c_ulonglong(source),
            ctypes.c_size_t(4 * numel),
            ctypes.c_void_p(stream),
        )
        self.call("cuMemcpyDtoDAsync_v2", *arguments)

    def copy_to_host(self, to: int, source: int, numel: int, stream: int) -> None:
        arguments = (
            ctypes.c_void_p(to),
            ctypes.c_ulonglong(source),
            ctypes.c_size_t(4 * numel),
            ctypes.c_void_p(stream),
        )
        self.call("cuMemcpyDtoHAsync_v2", *arguments)

    @staticmethod
    def values(address: int, numel: int) -> list[float]:
        """As they are in memory now, whatever is still to run."""
        return array("f", ctypes.string_at(address, 4 * numel)).tolist()

    # ---- tasks, as another library of the device enqueues them

    def task(
        self,
        name: str,
        stream: int,
        step: Callable[[], bool],
        drop: Callable[[], None] = lambda: None,
        writes: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """step: True once it is complete. writes: (address, bytes)."""
        callbacks = _Step(lambda _: step()), _Drop(lambda _: drop())
        self._callbacks.append(callbacks)
        ranges = (Range * len(writes))(*[Range(address, count, True) for address, count in writes])
        task = _Task(name.encode(), *callbacks, None, ranges, len(writes))
        self.call("fake_enqueue", ctypes.c_void_p(stream), ctypes.byref(task))

    # ---- kernels of test_kernels.cpp

    def fill(self, to: int, numel: int, value: float, stream: int) -> None:
        self.launch("test_fill", numel, stream, ctypes.c_uint64(to), ctypes.c_uint(numel), ctypes.c_float(value))

    def axpy(self, to: int, source: int, numel: int, stream: int, factor: float = 1.0) -> None:
        """to += factor * source"""
        pointers = ctypes.c_uint64(to), ctypes.c_uint64(source)
        self.launch("test_axpy", numel, stream, *pointers, ctypes.c_uint(numel), ctypes.c_float(factor))

    def copy_kernel(self, to: int, source: int, numel: int, stream: int) -> None:
        self.launch("test_copy", numel, stream, ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_uint(numel))

    def launch(self, name: str, numel: int, stream: int, *arguments: ctypes._SimpleCData) -> None:
        if name not in self.functions:
            module = self.made("cuModuleLoadData", b"image")
            self.functions[name] = self.made("cuModuleGetFunction", ctypes.c_void_p(module), name.encode())
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        blocks = max(1, (numel + 63) // 64)
        function = ctypes.c_void_p(self.functions[name])
        self.call("cuLaunchKernel", function, blocks, 1, 1, 64, 1, 1, 0, ctypes.c_void_p(stream), pointers, None)
