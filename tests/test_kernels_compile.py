"""codec.cu under every compiler that it is for, and the code that they make of it. No GPU is needed.

nvcc and g++ compile it as the build does, NVRTC as the package does at first use.
"""

import re
import shutil
import subprocess

import pytest
import sass
import vendor

from gpucomm import _core
from gpucomm.errors import CommError

CODEC = vendor.ROOT / "csrc/cuda/codec.cu"
ARCHS = (80, 90, 100)
LOADS_IN_FLIGHT = 4
MOST_REGISTERS = 48  # five blocks of 256 threads a multiprocessor
HALVES_AND_FLOATS = ("f32", "f16", "bf16")
PAIRS = [(a, b) for a in HALVES_AND_FLOATS for b in HALVES_AND_FLOATS] + [("f64", "f64")]
CONVERTING = [f"{what}_{a}_{b}" for what in ("pack", "unpack") for a, b in PAIRS]
FLAT = [f"{what}_{name}" for what in ("squared_norm", "scale") for name in (*HALVES_AND_FLOATS, "f64")]
MOVING = CONVERTING + FLAT  # memory by 16 bytes
KERNELS = {*MOVING, "sum_partials"}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8}

pytestmark = pytest.mark.nvidia

nvrtc_wheels = vendor.wheels("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
each_nvrtc = vendor.each("nvrtc", nvrtc_wheels, "NVRTC")


def library_of(nvrtc):
    """The wheel's libnvrtc; skips without a wheel."""
    if nvrtc is None:
        vendor.missing("NVRTC (nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc)")
    return str(nvrtc.file("lib/libnvrtc.so." + nvrtc.version.split(".")[0]))


def find_nvcc():
    """The toolkit's, else the wheel's; skips without either."""
    toolkit = vendor.toolkit()
    found = [toolkit / "bin/nvcc"] if toolkit else []
    found += [wheel.file("bin/nvcc") for wheel in vendor.wheels("nvidia-cuda-nvcc")]
    compilers = [nvcc for nvcc in found if nvcc.exists()]
    if not compilers:
        vendor.missing("nvcc")
    return compilers[0]


def nvcc_cubin(arch, folder):
    cubin = folder / "codec.cubin"
    command = [find_nvcc(), "-std=c++17", "-cubin", f"-arch=sm_{arch}", "-Xptxas=-v", "-Werror=all-warnings"]
    ran = subprocess.run([*command, "-o", str(cubin), str(CODEC)], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return cubin, ran.stderr


def nvrtc_cubin(nvrtc, arch, folder):
    library = library_of(nvrtc)
    try:
        image, _ = _core.cuda_compile_kernels(library, arch)
    except ValueError as error:
        pytest.skip(str(error))
    cubin = folder / "codec.cubin"
    cubin.write_bytes(image)
    return cubin


@pytest.fixture(scope="module", params=ARCHS, ids=[f"sm_{arch}" for arch in ARCHS])
def from_nvcc(request, tmp_path_factory):
    """A cubin, and what ptxas said."""
    return nvcc_cubin(request.param, tmp_path_factory.mktemp("nvcc"))


@pytest.fixture(
    scope="module",
    params=[(nvrtc, arch) for nvrtc in nvrtc_wheels or [None] for arch in ARCHS],
    ids=lambda one: f"{one[0] or 'no NVRTC'}-sm_{one[1]}",
)
def from_nvrtc(request, tmp_path_factory):
    return nvrtc_cubin(*request.param, tmp_path_factory.mktemp("nvrtc"))


def test_nvcc_compiles_every_kernel_without_spills(from_nvcc, record_property):
    _, report = from_nvcc
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert set(kernels) == KERNELS
    assert len(frames) == len(registers) == len(KERNELS)
    assert set(frames) == {("0", "0", "0")}
    assert max(registers) <= MOST_REGISTERS
    record_property("registers", dict(zip(kernels, registers, strict=True)))


def test_nvrtc_compiles_every_kernel_without_spills(from_nvrtc):
    usage = sass.usage(from_nvrtc)
    assert set(usage) == KERNELS
    for kernel, of in usage.items():
        assert (of["STACK"], of["LOCAL"]) == (0, 0), kernel
        assert of["REG"] <= MOST_REGISTERS, kernel


def test_the_host_compiler_takes_the_kernels_without_a_warning(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("a C++ compiler is not here")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Wno-unknown-pragmas", "-Werror"]
    source = vendor.ROOT / "tests/fake_cuda/driver/host_kernels.cpp"
    out = str(tmp_path / "kernels.o")
    folders = [f"-I{vendor.ROOT / folder}" for folder in ("csrc", "tests")]
    command = [compiler, *flags, *folders, "-c", str(source), "-o", out]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr


def check_kernels(cubin):
    functions = sass.disassemble(cubin)
    assert set(functions) == KERNELS
    for function in functions.values():
        check_memory(function)
        if function.name in MOVING:
            check_main_loop(function)


def check_memory(function):
    generic = [i.text for i in function.instructions if i.is_generic]
    assert not generic, f"{function.name} does not know that memory is global: {generic}"


def check_main_loop(function):
    """Whole tiles: nothing but 16 bytes at a time, and every load of a turn under way before one is waited for."""
    loops = [loop for loop in function.loops() if any(i.is_load and i.opcode.endswith(".128") for i in loop)]
    assert len(loops) == 1, f"{function.name} has {len(loops)} loops with loads of 16 bytes"
    loads = [i for i in loops[0] if i.is_load]
    stores = [i for i in loops[0] if i.is_store]
    narrow = [i.text for i in loads + stores if not i.opcode.endswith(".128")]
    assert not narrow, f"{function.name}: {narrow}"
    assert len(loads) == LOADS_IN_FLIGHT, function.name
    assert len(stores) == stores_per_turn(function.name), function.name
    pending = set()
    for instruction in loops[0]:
        if instruction.address > loads[-1].address:
            break
        early = instruction.registers & pending
        assert not early, f"{function.name} waits before its last load: {instruction.text}"
        if instruction.is_load:
            pending |= instruction.loaded


def stores_per_turn(kernel):
    what, *types = kernel.rsplit("_", 2) if kernel in CONVERTING else kernel.rsplit("_", 1)
    if what == "squared_norm":
        return 0
    return LOADS_IN_FLIGHT * BYTES[types[-1]] // BYTES[types[0]]


def test_what_nvcc_makes_moves_16_bytes_at_a_time(from_nvcc):
    check_kernels(from_nvcc[0])


def test_what_nvrtc_makes_moves_16_bytes_at_a_time(from_nvrtc):
    check_kernels(from_nvrtc)


def test_the_checks_of_the_code_see_narrow_loads_and_early_waits():
    good = ["LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R2.64+0x200]"]
    good += ["LDG.E.128 R12, desc[UR4][R2.64+0x400]", "LDG.E.128 R16, desc[UR4][R2.64+0x600]"]
    store = "STG.E.128 desc[UR4][R20.64], R4"
    jump = "BRA 0x0"

    def main_loop(*texts):
        instructions = [sass.Instruction(16 * i, text) for i, text in enumerate(texts)]
        return sass.DeviceFunction("pack_f32_f32", instructions)

    check_main_loop(main_loop(*good, *[store] * 4, jump))
    for texts in (
        [*good[:3], "LDG.E.64 R16, desc[UR4][R2.64+0x600]", *[store] * 4, jump],
        [*good[:3], "FMUL R1, R6, R6", good[3], *[store] * 4, jump],
        [*good[:3], *[store] * 4, jump],
        [*good, *[store] * 3, "STG.E.64 desc[UR4][R20.64], R4", jump],
    ):
        with pytest.raises(AssertionError):
            check_main_loop(main_loop(*texts))
    with pytest.raises(AssertionError):
        check_memory(main_loop("LD.E.128 R4, [R2.64]"))


@each_nvrtc
def test_compiled_kernels_are_kept_and_a_broken_file_is_compiled_again(nvrtc, tmp_path):
    library = library_of(nvrtc)
    folder = tmp_path / "deep" / "cache"
    image, origin = _core.cuda_compile_kernels(library, 80, str(folder))
    assert image.startswith(b"\x7fELF")
    (kept,) = folder.iterdir()
    assert origin.endswith(f"kept in {kept}")
    whole = kept.read_bytes()
    assert _core.cuda_compile_kernels(library, 80, str(folder)) == (image, origin.replace("kept in", "from"))
    kept.write_bytes(whole[:-1])
    assert _core.cuda_compile_kernels(library, 80, str(folder)) == (image, origin)
    assert kept.read_bytes() == whole
    assert list(folder.iterdir()) == [kept]


@each_nvrtc
def test_a_cache_folder_that_cannot_be_written_is_told_and_does_no_harm(nvrtc, tmp_path):
    library = library_of(nvrtc)
    (tmp_path / "file").write_text("")
    image, origin = _core.cuda_compile_kernels(library, 80, str(tmp_path / "file"))
    assert image.startswith(b"\x7fELF")
    assert "not kept" in origin
    assert str(tmp_path / "file") in origin


@each_nvrtc
def test_a_device_that_nvrtc_does_not_know_is_refused_by_name(nvrtc):
    with pytest.raises(ValueError, match=r"sm_19: a newer one is needed"):
        _core.cuda_compile_kernels(library_of(nvrtc), 19)


@each_nvrtc
def test_a_newer_device_of_a_known_generation_gets_that_generations_newest(nvrtc):
    _, origin = _core.cuda_compile_kernels(library_of(nvrtc), 88)
    assert re.search(r"for sm_8[6-9]$", origin), origin


def test_the_fat_binary_holds_the_kernels(tmp_path):
    binary = _core.cuda_fat_binary()
    if not binary:
        vendor.no_toolkit("nvcc, when this was built,")
    image = tmp_path / "codec.fatbin"
    image.write_bytes(binary)
    command = [sass.cuobjdump(), "-lelf", "-lptx", str(image)]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert re.search(r"sm_\d+\.cubin", listed.stdout), listed
    assert re.search(r"sm_\d+\.ptx", listed.stdout), listed
    assert set(sass.usage(image)) == KERNELS


def test_a_library_that_is_no_nvrtc_is_refused():
    with pytest.raises(CommError, match="no NVRTC"):
        _core.cuda_compile_kernels("/nonexistent/libnvrtc.so.12", 90)
