"""A program that uses NCCL, for tests of the stand-in itself: the calls of libnccl that gpucomm makes, from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from fake_cuda.control import Control, loaded
from fake_cuda.program import Program

VERSIONS = (21805, 21903, 22105, 22509, 22703, 22809, 23007, 23203)
USUAL = 22809

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = range(8)
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
SYMMETRIC = 1
SHRINK_ABORT = 1
UNSET = -(2**31)

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of 2.27; what is not given is unset."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    ]

    def __init__(self, **given: object) -> None:
        values = {name: UNSET for name, kind in self._fields_ if kind is ctypes.c_int}
        values |= {"size": ctypes.sizeof(Config), "magic": 0xCAFEBEEF, "version": 22700}
        super().__init__(**(values | given))


_TYPES = {
    "ncclCommInitRankConfig": (_pointer, ctypes.c_int, UniqueId, ctypes.c_int, _pointer),
    "ncclAllReduce": (_pointer, _pointer, _size, ctypes.c_int, ctypes.c_int, _pointer, _pointer),
    "ncclReduceScatter": (_pointer, _pointer, _size, ctypes.c_int, ctypes.c_int, _pointer, _pointer),
    "ncclAllGather": (_pointer, _pointer, _size, ctypes.c_int, _pointer, _pointer),
    "ncclBroadcast": (_pointer, _pointer, _size, ctypes.c_int, ctypes.c_int, _pointer, _pointer),
    "ncclCommSplit": (_pointer, ctypes.c_int, ctypes.c_int, _pointer, _pointer),
    "ncclCommShrink": (_pointer, _pointer, ctypes.c_int, _pointer, _pointer, ctypes.c_int),
    "ncclCommFinalize": (_pointer,),
    "ncclCommDestroy": (_pointer,),
    "ncclCommAbort": (_pointer,),
    "ncclCommRevoke": (_pointer, ctypes.c_int),
    "ncclCommCount": (_pointer, _pointer),
    "ncclCommGetAsyncError": (_pointer, _pointer),
    "ncclMemAlloc": (_pointer, _size),
    "ncclMemFree": (_pointer,),
    "ncclCommRegister": (_pointer, _pointer, _size, _pointer),
    "ncclCommDeregister": (_pointer, _pointer),
    "ncclCommWindowRegister": (_pointer, _pointer, _size, _pointer, ctypes.c_int),
    "ncclCommWindowDeregister": (_pointer, _pointer),
}


class NcclError(Exception):
    def __init__(self, symbol: str, result: int, text: str) -> None:
        super().__init__(f"{symbol} returned {result}: {text}")
        self.result = result
        self.text = text


class Nccl:
    """One version of the library, on the driver's stand-in of this process. Communicators are integers."""

    def __init__(self, control: Control, version: int = USUAL) -> None:
        self.library = ctypes.CDLL(str(control.path.with_name(f"libfake_nccl_{version}.so")))
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        self.library.fake_nccl_script.restype = ctypes.c_char_p
        self.library.fake_nccl_net_name.restype = ctypes.c_char_p
        for name, arguments in _TYPES.items():
            if hasattr(self.library, name):
                getattr(self.library, name).argtypes = arguments

    def has(self, symbol: str) -> bool:
        return hasattr(self.library, symbol)

    def call(self, symbol: str, *arguments: object) -> None:
        result = getattr(self.library, symbol)(*arguments)
        if result:
            raise NcclError(symbol, result, self.library.ncclGetLastError(None).decode())

    def result(self, symbol: str, *arguments: object) -> int:
        return getattr(self.library, symbol)(*arguments)

    def reset(self) -> None:
        """As freshly loaded; to be called with Control.reset."""
        self.library.fake_nccl_reset()

    def config(self, member: str) -> int | None:
        """What the last communicator that was made of a configuration was told; None: nothing."""
        value = self.library.fake_nccl_config(member.encode())
        return None if value == UNSET else value

    def net_name(self) -> str:
        return self.library.fake_nccl_net_name().decode()

    def script(self, text: str) -> None:
        """See nccl/control.h; replaces the one before."""
        fault = self.library.fake_nccl_script(text.encode())
        if fault is not None:
            raise ValueError(fault.decode())

    @contextmanager
    def group(self) -> Iterator[None]:
        self.call("ncclGroupStart")
        try:
            yield
        finally:
            self.call("ncclGroupEnd")

    # ---- communicators

    def unique_id(self) -> UniqueId:
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return unique_id

    def init(self, unique_id: UniqueId, rank: int, world: int, config: Config | None = None) -> int:
        return self._made("ncclCommInitRankConfig", world, unique_id, rank, config and ctypes.byref(config))

    def split(self, comm: int, color: int, key: int) -> int:
        made = ctypes.c_void_p()
        self.call("ncclCommSplit", comm, color, key, ctypes.byref(made), None)
        return made.value or 0

    def shrink(self, comm: int, *excluded: int, flags: int = 0) -> int:
        made = ctypes.c_void_p()
        ranks = (ctypes.c_int * len(excluded))(*excluded)
        self.call("ncclCommShrink", comm, ranks, len(excluded), ctypes.byref(made), None, flags)
        return made.value or 0

    def count(self, comm: int) -> int:
        count = ctypes.c_int()
        self.call("ncclCommCount", comm, ctypes.byref(count))
        return count.value

    def state(self, comm: int) -> int:
        """The asynchronous error."""
        error = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(error))
        return error.value

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        return self._made("ncclMemAlloc", nbytes)

    def window(self, comm: int, address: int, nbytes: int, flags: int = SYMMETRIC) -> int:
        window = ctypes.c_void_p()
        self.call("ncclCommWindowRegister", comm, address, nbytes, ctypes.byref(window), flags)
        return window.value or 0

    def register(self, comm: int, address: int, nbytes: int) -> int:
        handle = ctypes.c_void_p()
        self.call("ncclCommRegister", comm, address, nbytes, ctypes.byref(handle))
        return handle.value or 0

    def _made(self, symbol: str, *arguments: object) -> int:
        made = ctypes.c_void_p()
        self.call(symbol, ctypes.byref(made), *arguments)
        return made.value or 0

    # ---- collectives, on tensors over device memory

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, op: str, comm: int, stream: int) -> None:
        self.call("ncclAllReduce", x.data_ptr(), out.data_ptr(), x.numel(), TYPES[x.dtype], OPS[op], comm, stream)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, op: str, comm: int, stream: int) -> None:
        self.call("ncclReduceScatter", x.data_ptr(), out.data_ptr(), out.numel(), TYPES[x.dtype], OPS[op], comm, stream)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor, comm: int, stream: int) -> None:
        self.call("ncclAllGather", x.data_ptr(), out.data_ptr(), x.numel(), TYPES[x.dtype], comm, stream)

    def broadcast(self, x: torch.Tensor, out: torch.Tensor, root: int, comm: int, stream: int) -> None:
        self.call("ncclBroadcast", x.data_ptr(), out.data_ptr(), out.numel(), TYPES[x.dtype], root, comm, stream)


def device_tensor(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Device memory as a tensor; what the host does with it is its own affair."""
    nbytes = numel * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)


class Rank:
    """One rank of a test: its device, a stream, NCCL and, once asked for, a communicator of all ranks."""

    def __init__(self, program: Program, nccl: Nccl, rank: int, world: int) -> None:
        self.program, self.nccl, self.rank, self.world = program, nccl, rank, world
        self.control = program.control
        self.stream = program.stream(f"stream of rank {rank}")

    def init(self, config: Config | None = None) -> int:
        """A communicator of all ranks, in their order."""
        return self.nccl.init(self.shared_id(), self.rank, self.world, config)

    def shared_id(self) -> UniqueId:
        made = [bytes(self.nccl.unique_id().bytes)] if self.rank == 0 else [None]
        if self.world > 1:
            dist.broadcast_object_list(made, src=0)
        return UniqueId((ctypes.c_byte * 128).from_buffer_copy(made[0]))

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Device memory that holds the values."""
        flat = values.flatten()
        address = self.program.made("cuMemAlloc_v2", ctypes.c_size_t(max(1, flat.numel() * flat.element_size())))
        return device_tensor(address, flat.numel(), flat.dtype).copy_(flat)

    def misuses(self) -> list[str]:
        """The texts of what was used wrongly, which are expected and forgotten."""
        texts = [report.text for report in self.control.reports("misuse")]
        self.control.clear_reports()
        return texts


@contextmanager
def on_device(
    rank: int, world: int, version: int = USUAL, script: str = "", device: int | None = None
) -> Iterator[Rank]:
    """A fresh machine with a device for each rank, and this rank's current. Errors not taken fail the test."""
    control = loaded()
    control.reset()
    control.machine(device_count=world)
    control.deadline(15)
    nccl = Nccl(control, version)
    nccl.reset()
    nccl.script(script)
    with Program(control, rank if device is None else device) as program:
        yield Rank(program, nccl, rank, world)
        assert control.errors() == []
