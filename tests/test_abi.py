"""Our declarations of CUDA, NVRTC and NCCL (csrc/*/*_api.h) against the real headers, at compile time: tests/abi/.

The loaders and the stand-ins of the tests are built from these declarations, so this ties both to the truth.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import vendor

CSRC = vendor.ROOT / "csrc"
ABI = vendor.ROOT / "tests/abi"
STAND_INS = ABI / "without_runtime"

pytestmark = pytest.mark.nvidia


@dataclass(frozen=True)
class Headers:
    """One version of a header, with the folders in which the compiler finds what it includes."""

    text: str
    folders: tuple[Path, ...]

    def __str__(self):
        return self.text


def cuda_headers():
    found = []
    if toolkit := vendor.toolkit():
        found.append(Headers(f"toolkit-{toolkit.resolve().name}", (toolkit / "include",)))
    for wheel in vendor.wheels("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        found.append(Headers(str(wheel), (wheel.file("include/cuda.h").parent,)))
    return found


def nvrtc_headers():
    wheels = vendor.wheels("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
    return [Headers(str(wheel), (wheel.file("include/nvrtc.h").parent,)) for wheel in wheels]


def nccl_headers():
    """With the headers of CUDA that it includes: a toolkit's, or a wheel's cuda.h and stand-ins for the rest."""
    cuda = cuda_headers()
    if not cuda:
        return []
    toolkit = cuda[0].text.startswith("toolkit")
    beside = cuda[0].folders if toolkit else (STAND_INS, *cuda[0].folders)
    wheels = vendor.wheels("nvidia-nccl-cu12", "nvidia-nccl-cu13")
    return [Headers(str(wheel), (wheel.file("include/nccl.h").parent, *beside)) for wheel in wheels]


# Source in tests/abi: the headers of ours that it checks, and the real ones.
CHECKS = {
    "driver_types.cpp": ("cuda/cuda_api.h", cuda_headers),
    "driver_names.cpp": ("cuda/cuda_api.h", cuda_headers),
    "nvrtc.cpp": ("cuda/nvrtc_api.h", nvrtc_headers),
    "nccl.cpp": ("nccl/nccl_api.h", nccl_headers),
}


def complaints(source, headers, ours=CSRC):
    """The compiler's errors about a source of tests/abi; ours: comes before csrc/, file by file."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("a C++ compiler is not here")
    folders = [f"-I{folder}" for folder in (ours, CSRC, ABI)] + [f"-isystem{folder}" for folder in headers.folders]
    ran = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", *folders, str(ABI / source)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    errors = [line for line in ran.stderr.splitlines() if "error" in line]
    assert bool(errors) == (ran.returncode != 0), ran.stderr
    return errors


@pytest.mark.parametrize("source", ["driver_types.cpp", "driver_names.cpp"])
@vendor.each("headers", cuda_headers(), "cuda.h")
def test_the_driver_is_as_we_declare_it(source, headers):
    if headers is None:
        vendor.missing("cuda.h")
    assert complaints(source, headers) == []


@vendor.each("headers", nvrtc_headers(), "nvrtc.h")
def test_nvrtc_is_as_we_declare_it(headers):
    if headers is None:
        vendor.missing("nvrtc.h")
    assert complaints("nvrtc.cpp", headers) == []


@vendor.each("headers", nccl_headers(), "nccl.h")
def test_nccl_is_as_we_declare_it(headers):
    if headers is None:
        vendor.missing("nccl.h with cuda.h")
    assert complaints("nccl.cpp", headers) == []


# ---- nothing is left out: functions are taken from the tables, constants are counted here


@pytest.mark.parametrize("header", ["cuda/cuda_api.h", "cuda/nvrtc_api.h", "nccl/nccl_api.h"])
def test_every_constant_is_compared(header):
    declared = set(re.findall(r"\b(k[A-Z]\w*) =", (CSRC / header).read_text()))
    text = "".join((ABI / source).read_text() for source, (of, _) in CHECKS.items() if of == header)
    compared = set(re.findall(r"^ABI_EQUAL\((\w+),", text, re.MULTILINE))
    # Of ours alone.
    declared -= {"kDriverName", "kOldestDriver", "kConfigMagic", "kUnset"}
    assert declared == compared


# ---- and a wrong declaration fails

WRONG = [
    # (source, what is written, what is wrong in its place, what the compiler must name)
    ("driver_types.cpp", "Result(int* version)", "Result(int version)", "cuDriverGetVersion"),
    ("driver_types.cpp", "Result(int* version)", "Result(const int* version)", "cuDriverGetVersion"),
    ("driver_types.cpp", "using Result = int", "using Result = long long", "cuInit"),
    ("driver_types.cpp", "Result(unsigned flags)", "Result(unsigned flags, int more)", "cuInit"),
    ("driver_types.cpp", "(DeviceAddress* address, size_t", "(unsigned* address, size_t", "cuMemAlloc_v2"),
    ("driver_types.cpp", "cuMemAlloc, cuMemAlloc_v2", "cuMemAlloc, cuMemAlloc", "cuMemAlloc"),
    ("driver_types.cpp", "using StreamHandle = CUstream_st*", "using StreamHandle = CUevent_st*", "cuStreamQuery"),
    ("driver_types.cpp", "const void* from, size_t bytes", "const void* from, unsigned bytes", "cuMemcpyHtoDAsync_v2"),
    ("driver_types.cpp", "char bytes[16]", "char bytes[8]", "CUuuid"),
    ("driver_types.cpp", "cuStreamQuery, cuStreamQuery,", "cuStreamQuery, cuStreamAsk,", "cuStreamAsk"),
    ("driver_names.cpp", "cuStreamDestroy_v2", "cuStreamDestroy", "cuStreamDestroy"),
    ("driver_names.cpp", "kNotReady = 600", "kNotReady = 601", "kNotReady"),
    ("driver_names.cpp", "kComputeMinor = 76", "kComputeMinor = 77", "kComputeMinor"),
    ("nvrtc.cpp", "Result(Program* program)", "Result(Program program)", "nvrtcDestroyProgram"),
    ("nvrtc.cpp", "kCompilation = 6", "kCompilation = 5", "kCompilation"),
    ("nccl.cpp", "UniqueId id, int rank", "UniqueId* id, int rank", "ncclCommInitRankConfig"),
    ("nccl.cpp", "size_t count, DataType type, RedOp op", "int count, DataType type, RedOp op", "ncclAllReduce"),
    ("nccl.cpp", "RedOp : int", "RedOp : long", "ncclAllReduce"),
    ("nccl.cpp", "char bytes[128]", "char bytes[120]", "ncclUniqueId"),
    ("nccl.cpp", "kAvg = 4", "kAvg = 3", "kAvg"),
    ("nccl.cpp", "min_ctas = kUnset;\n  int max_ctas", "max_ctas = kUnset;\n  int min_ctas", "minCTAs"),
    ("nccl.cpp", "int split_share = kUnset", "int split_share = 0", "splitShare"),
    ("nccl.cpp", "kConfigMagic = 0xcafebeef", "kConfigMagic = 0xcafebeee", "magic"),
    ("nccl.cpp", "version = 22700", "version = 99999", "version"),
    ("nccl.cpp", "ncclCommRevoke, 22807", "ncclCommRevoke, 22806", "nccl.cpp"),
]


@pytest.mark.parametrize(("source", "right", "wrong", "named"), WRONG, ids=lambda text: re.sub(r"\W+", "_", text))
def test_a_wrong_declaration_is_found(source, right, wrong, named, tmp_path):
    header, find = CHECKS[source]
    found = find()
    if not found:
        vendor.missing(f"what {source} includes")
    text = (CSRC / header).read_text()
    assert right in text, f"{header} no longer says {right!r}"
    (tmp_path / header).parent.mkdir()
    (tmp_path / header).write_text(text.replace(right, wrong))
    errors = complaints(source, found[0], ours=tmp_path)
    assert any(named in error for error in errors), errors
