"""Builds libfake_cuda.so, and speaks to it: control.h for Python."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FOLDER = SOURCES.parents[1] / "build" / "fake_cuda"

ORDERS = ("earliest", "latest", "random")
KINDS = ("race", "memory", "misuse", "leak", "stuck", "note")


def _tool(name: str) -> str:
    """A program of this environment, else of the system."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        raise FileNotFoundError(f"{name} is needed to build tests/fake_cuda and is not there")
    return found


def build(folder: Path = FOLDER) -> Path:
    """The folder with libfake_cuda.so and its kin in their present form; compiles what has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        jobs = str(min(4, os.cpu_count() or 1))
        for command in (
            [_tool("cmake"), "-S", SOURCES, "-B", folder, "-G", "Ninja", "--log-level=WARNING"],
            [_tool("cmake"), "--build", folder, "-j", jobs],
        ):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"building tests/fake_cuda failed:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")
    return folder


class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("write", ctypes.c_bool)]


class Allocation(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("device", ctypes.c_int),
        ("is_host", ctypes.c_bool),
    ]


@dataclass(frozen=True)
class Report:
    kind: str  # of KINDS
    text: str
    times: int


@dataclass(frozen=True)
class Site:
    """A place in the program that records an event or makes a stream wait."""

    name: str
    calls: int


_stream = ctypes.c_void_p
_text = ctypes.c_char_p
_TYPES = {
    "fake_reset": (None,),
    "fake_set_order": (None, ctypes.c_int, ctypes.c_uint64),
    "fake_set_deadline": (None, ctypes.c_double),
    "fake_drive_when_idle": (None, ctypes.c_double),
    "fake_drain": (ctypes.c_bool,),
    "fake_run_until": (ctypes.c_bool, _stream),
    "fake_synchronize": (ctypes.c_bool, _stream),
    "fake_order": (ctypes.c_bool, _stream, _stream),
    "fake_op": (ctypes.c_bool, _stream, _text, ctypes.POINTER(Range), ctypes.c_size_t),
    "fake_access": (ctypes.c_bool, _stream, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, _text),
    "fake_host_access": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, _text),
    "fake_register": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, _text, _stream),
    "fake_adopt": (ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, _text),
    "fake_forget": (ctypes.c_bool, ctypes.c_void_p),
    "fake_find_allocation": (ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(Allocation)),
    "fake_unregister": (ctypes.c_bool, ctypes.c_void_p, _stream, ctypes.POINTER(_stream), ctypes.c_size_t),
    "fake_report_count": (ctypes.c_size_t,),
    "fake_report_kind": (ctypes.c_int, ctypes.c_size_t),
    "fake_report_times": (ctypes.c_uint64, ctypes.c_size_t),
    "fake_report_text": (_text, ctypes.c_size_t),
    "fake_clear_reports": (None,),
    "fake_check_leaks": (None,),
    "fake_set_device_count": (None, ctypes.c_int),
    "fake_set_driver_version": (None, ctypes.c_int),
    "fake_set_capability": (None, ctypes.c_int, ctypes.c_int),
    "fake_set_memory": (None, ctypes.c_size_t),
    "fake_fail_call": (None, _text, ctypes.c_uint64, ctypes.c_int),
    "fake_calls": (ctypes.c_uint64, _text),
    "fake_set_site_depth": (None, ctypes.c_int),
    "fake_site_count": (ctypes.c_size_t,),
    "fake_site_name": (_text, ctypes.c_size_t),
    "fake_site_calls": (ctypes.c_uint64, ctypes.c_size_t),
    "fake_mutate": (None, ctypes.c_int),
    "fake_begin_capture": (ctypes.c_bool, _stream, ctypes.c_int),
    "fake_end_capture": (ctypes.c_bool, _stream),
    "fake_name_stream": (None, _stream, _text),
    "fake_name_memory": (None, ctypes.c_void_p, _text),
}


class Control:
    """The stand-in of this process. Streams are integers (0: the legacy stream), memory is addresses and bytes.

    Calls let go of the interpreter's lock, and may wait as long as the deadline allows for work that waits for peers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or build()) / "libfake_cuda.so"
        self.library = ctypes.CDLL(str(self.path))
        for name, (result, *arguments) in _TYPES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    # ---- the run

    def reset(self) -> None:
        self.library.fake_reset()

    def order(self, order: str, seed: int = 0) -> None:
        self.library.fake_set_order(ORDERS.index(order), seed)

    def deadline(self, seconds: float) -> None:
        self.library.fake_set_deadline(seconds)

    def drive_when_idle(self, seconds: float) -> None:
        """A thread runs what can run once nothing else has driven for so long; 0: none. Not before a fork."""
        self.library.fake_drive_when_idle(seconds)

    def drain(self) -> bool:
        """Runs everything. False: some of it did not get to its end within the deadline."""
        return self.library.fake_drain()

    def run_until(self, stream: int) -> bool:
        """Runs what new work on the stream would wait for, and nothing else."""
        return self.library.fake_run_until(stream)

    def synchronize(self, stream: int) -> bool:
        """The same, and the host is ordered after it."""
        return self.library.fake_synchronize(stream)

    def wait_stream(self, then: int, first: int) -> bool:
        """As torch's then.wait_stream(first). No ordering site of the program: mutations leave it alone."""
        return self.library.fake_order(first, then)

    # ---- accesses

    def op(
        self, stream: int, name: str, reads: Iterable[tuple[int, int]] = (), writes: Iterable[tuple[int, int]] = ()
    ) -> bool:
        """Work on a stream that has just been done, by its (address, bytes)."""
        ranges = [Range(address, count, False) for address, count in reads]
        ranges += [Range(address, count, True) for address, count in writes]
        return self.library.fake_op(stream, name.encode(), (Range * len(ranges))(*ranges), len(ranges))

    def host_access(self, address: int, count: int, write: bool, name: str = "program") -> bool:
        return self.library.fake_host_access(address, count, write, name.encode())

    def register(self, address: int, count: int, name: str, stream: int = 0) -> bool:
        """Declares memory to be device memory, allocated on a stream at this point of it."""
        return self.library.fake_register(address, count, name.encode(), stream)

    def adopt(self, address: int, count: int, name: str) -> bool:
        """The same, for memory whose life until now is over."""
        return self.library.fake_adopt(address, count, name.encode())

    def forget(self, address: int) -> bool:
        """Not device memory any longer, without having been freed."""
        return self.library.fake_forget(address)

    def allocation(self, address: int) -> Allocation | None:
        """The live memory that holds an address."""
        found = Allocation()
        return found if self.library.fake_find_allocation(address, ctypes.byref(found)) else None

    def unregister(self, address: int, stream: int = 0, used: Iterable[int] = ()) -> bool:
        """The memory is freed: a write on the stream, after all that is enqueued on the streams `used`."""
        streams = list(used)
        return self.library.fake_unregister(address, stream, (_stream * len(streams))(*streams), len(streams))

    # ---- reports

    def reports(self, *kinds: str) -> list[Report]:
        """Of these kinds, or of all, in the order in which they were first made."""
        library = self.library
        found = [
            Report(
                KINDS[library.fake_report_kind(i)], library.fake_report_text(i).decode(), library.fake_report_times(i)
            )
            for i in range(library.fake_report_count())
        ]
        return [report for report in found if not kinds or report.kind in kinds]

    def errors(self) -> list[Report]:
        """All reports but notes."""
        return self.reports(*KINDS[:-1])

    def take_errors(self, kind: str) -> list[str]:
        """The texts of what is wrong once everything has run: expected, so it is forgotten.

        Something must be, and all of it of this kind.
        """
        self.drain()
        errors = self.errors()
        assert {error.kind for error in errors} == {kind}, errors
        self.clear_reports()
        return [error.text for error in errors]

    def clear_reports(self) -> None:
        self.library.fake_clear_reports()

    def check_leaks(self) -> None:
        """Reports what was not given back."""
        self.library.fake_check_leaks()

    # ---- scripts

    def machine(
        self,
        device_count: int | None = None,
        driver_version: int | None = None,
        capability: tuple[int, int] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """What the driver says that there is. driver_version: 1000 * major + 10 * minor."""
        if device_count is not None:
            self.library.fake_set_device_count(device_count)
        if driver_version is not None:
            self.library.fake_set_driver_version(driver_version)
        if capability is not None:
            self.library.fake_set_capability(*capability)
        if memory_bytes is not None:
            self.library.fake_set_memory(memory_bytes)

    def fail_call(self, symbol: str, nth: int, result: int) -> None:
        """The nth call of a function from now (1: the next) only returns that result."""
        self.library.fake_fail_call(symbol.encode(), nth, result)

    def calls(self, symbol: str) -> int:
        return self.library.fake_calls(symbol.encode())

    def sites(self) -> list[Site]:
        library = self.library
        return [
            Site(library.fake_site_name(i).decode(), library.fake_site_calls(i))
            for i in range(library.fake_site_count())
        ]

    @contextmanager
    def mutation(self, site: int) -> Iterator[None]:
        """The calls of one ordering site do nothing within."""
        self.library.fake_mutate(site)
        try:
            yield
        finally:
            self.library.fake_mutate(-1)

    # ---- capture

    @contextmanager
    def capture(self, stream: int, mode: int = 0) -> Iterator[None]:
        """A graph is captured on the stream within (mode: 0 global, 1 of this thread, 2 relaxed).

        Raises RuntimeError where its rules were broken; the reports say how.
        """
        if not self.library.fake_begin_capture(stream, mode):
            raise RuntimeError(self.reports("misuse")[-1].text)
        try:
            yield
        finally:
            is_whole = self.library.fake_end_capture(stream)
        if not is_whole:
            raise RuntimeError("the capture is invalid")

    # ---- names, for reports

    def name_stream(self, stream: int, name: str) -> None:
        self.library.fake_name_stream(stream, name.encode())

    def name_memory(self, address: int, name: str) -> None:
        self.library.fake_name_memory(address, name.encode())


@cache
def loaded() -> Control:
    """The one of this process, built once."""
    return Control()
