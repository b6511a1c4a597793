"""Loading the CUDA driver, NCCL and NVRTC, the last two from NVIDIA's wheels too: they run without a GPU.

A process keeps the first library that it loads, so each test has one of its own. tests/cpp/libraries_test.cpp has the
errors that no wheel can show.
"""

import json
import os
from pathlib import Path

import pytest
import vendor
from commands import environment, run_python

import gpucomm
from gpucomm import _core
from gpucomm.world import Settings

# The package without its __init__: torch for CUDA would bring an NCCL of its own.
PREAMBLE = f"""
import json, sys, types
package = types.ModuleType("gpucomm")
package.__path__ = {[str(Path(_core.__file__).parent), *gpucomm.__path__]}
sys.modules["gpucomm"] = package
from gpucomm import _core
from gpucomm.errors import CommError, TransportUnavailable
def raised(kind, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind, type(error)
        return str(error)
    sys.exit("nothing was raised")
"""


def outcome(code, cwd, **variables):
    """What a process that runs the code prints last, as JSON."""
    ran = run_python("-c", PREAMBLE + code, cwd=cwd, env=environment(**variables))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def has_driver():
    try:
        _core.cuda_load()
    except gpucomm.TransportUnavailable as error:
        return "cannot be loaded" not in str(error)
    return True


# ---- without any library


def test_without_a_driver_the_error_says_what_to_check(tmp_path):
    if has_driver():
        pytest.skip("this machine has a CUDA driver")
    text = outcome("print(json.dumps(raised(TransportUnavailable, _core.cuda_load)))", tmp_path)
    assert "libcuda.so.1" in text
    assert "nvidia-smi" in text


@pytest.mark.parametrize("call", ["cuda_load", "nccl_load"])
def test_an_explicit_path_that_leads_nowhere_is_named(call, tmp_path):
    path = str(tmp_path / "lib.so")
    text = outcome(f"print(json.dumps(raised(TransportUnavailable, lambda: _core.{call}({path!r}))))", tmp_path)
    assert path in text
    assert "explicit path" in text


@pytest.mark.parametrize("call", ["cuda_load", "nccl_load"])
def test_a_file_that_is_another_library_is_refused(call, tmp_path):
    code = f"print(json.dumps(raised(TransportUnavailable, lambda: _core.{call}(_core.__file__))))"
    text = outcome(code, tmp_path)
    assert _core.__file__ in text
    assert " is not a" in text


def test_without_nccl_the_error_says_where_it_was_looked_for(tmp_path):
    wheel = str(tmp_path / "libnccl.so.2")
    code = f"""
path = {wheel!r}
try:
    found = _core.nccl_load(wheel_path=path)["path"]
except TransportUnavailable as error:
    found = str(error)
print(json.dumps(found))
"""
    text = outcome(code, tmp_path)
    if Path(text).is_file():
        pytest.skip(f"this machine has an NCCL: {text}")
    assert wheel in text
    assert "libnccl.so.2: cannot open" in text
    assert "nvidia-nccl-cu12" in text


# ---- settings


def test_libraries_in_the_environment_are_absolute_paths_or_names(tmp_path, monkeypatch):
    (tmp_path / "libnccl.so.2").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUCOMM_NCCL_LIBRARY", os.path.join(".", "libnccl.so.2"))
    monkeypatch.setenv("GPUCOMM_CUDA_LIBRARY", "libcuda.so.1")
    settings = Settings.from_environment()
    assert (settings.nccl_library, settings.cuda_library) == (str(tmp_path / "libnccl.so.2"), "libcuda.so.1")
    monkeypatch.setenv("GPUCOMM_NCCL_LIBRARY", "")
    monkeypatch.delenv("GPUCOMM_CUDA_LIBRARY")
    settings = Settings.from_environment()
    assert (settings.nccl_library, settings.cuda_library) == ("", "")


# ---- the wheels' own libraries

FIND = "from gpucomm import libraries\n"


NCCL, NVRTC_12, NVRTC_13 = "nccl/lib/libnccl.so.2", "cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"


@pytest.mark.parametrize(
    ("files", "nccl", "nvrtcs"),
    [
        ([], "", []),
        (["nccl/include/nccl.h"], "", []),
        ([NCCL], NCCL, []),
        ([NVRTC_12], "", [NVRTC_12]),
        ([NVRTC_12, NCCL, NVRTC_13], NCCL, [NVRTC_13, NVRTC_12]),
    ],
)
def test_libraries_are_found_where_wheels_put_them(files, nccl, nvrtcs, tmp_path):
    for file in files:
        (tmp_path / "nvidia" / file).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / file).touch()
    code = f"""
sys.path[:] = [{str(tmp_path)!r}, *(path for path in sys.path if not path.endswith("-packages"))]
{FIND}print(json.dumps([libraries.nccl_wheel(), *libraries.nvrtc_wheels()]))
"""
    found = [path and str(tmp_path / "nvidia" / path) for path in (nccl, *nvrtcs)]
    assert outcome(code, tmp_path) == found


def nccl_wheel(toolkit):
    found = vendor.wheels(f"nvidia-nccl-{toolkit}")
    if not found:
        vendor.missing(f"the wheel nvidia-nccl-{toolkit}")
    return found[-1]


def libnccl(toolkit):
    return str(nccl_wheel(toolkit).file("lib/libnccl.so.2"))


each_toolkit = pytest.mark.parametrize("toolkit", ["cu12", "cu13"])
nvidia = pytest.mark.nvidia

FEATURES = {
    "ncclMemAlloc": 21900,
    "ncclMemFree": 21900,
    "ncclCommRegister": 21900,
    "ncclCommDeregister": 21900,
    "ncclCommWindowRegister": 22703,
    "ncclCommWindowDeregister": 22703,
    "ncclCommShrink": 22703,
    "ncclCommRevoke": 22807,
}


@nvidia
@each_toolkit
def test_the_wheels_nccl_is_found_and_has_what_its_version_promises(toolkit, tmp_path):
    wheel, path = nccl_wheel(toolkit), libnccl(toolkit)
    code = f"""
sys.path.insert(0, {str(wheel.folder)!r})
{FIND}print(json.dumps(_core.nccl_load(wheel_path=libraries.nccl_wheel())))
"""
    found = outcome(code, tmp_path)
    assert found["path"] == os.path.realpath(path)
    assert found["version_text"] == wheel.version.split(".post")[0]
    assert set(found["features"]) == {name for name, since in FEATURES.items() if found["version"] >= since}


@nvidia
@each_toolkit
def test_the_wheels_nccl_makes_unique_ids(toolkit, tmp_path):
    code = f"""
_core.nccl_load({libnccl(toolkit)!r})
print(json.dumps([_core.nccl_unique_id().hex() for _ in range(2)]))
"""
    one, other = outcome(code, tmp_path, NCCL_SOCKET_IFNAME="lo")
    assert len(bytes.fromhex(one)) == len(bytes.fromhex(other)) == 128
    assert one != other


@nvidia
@each_toolkit
def test_an_init_without_a_device_says_so(toolkit, tmp_path):
    if has_driver():
        pytest.skip("this machine has a CUDA driver")
    code = f"""
_core.nccl_load({libnccl(toolkit)!r})
print(json.dumps(raised(CommError, _core.nccl_try_init)))
"""
    text = outcome(code, tmp_path, NCCL_SOCKET_IFNAME="lo")
    assert text.startswith("ncclCommInitRankConfig failed with NCCL's result 1: unhandled cuda error")
    assert "CUDA driver version is insufficient" in text


@nvidia
@each_toolkit
def test_the_nccl_that_the_process_has_loaded_is_taken(toolkit, tmp_path):
    code = f"""
import ctypes
ctypes.CDLL({libnccl(toolkit)!r})
print(json.dumps(_core.nccl_load(wheel_path="/nowhere/libnccl.so.2")))
"""
    assert outcome(code, tmp_path)["path"] == os.path.realpath(libnccl(toolkit))


@nvidia
@pytest.mark.parametrize("first", ["ours", "another's"])
def test_a_second_nccl_is_refused_and_both_are_named(first, tmp_path):
    one, other = libnccl("cu12"), libnccl("cu13")
    load = f"_core.nccl_load({one!r})" if first == "ours" else f"import ctypes; ctypes.CDLL({one!r})"
    code = f"""
{load}
text = raised(ValueError, lambda: _core.nccl_load({other!r}))
loaded = [line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line]
print(json.dumps([text, sorted(set(loaded))]))
"""
    text, loaded = outcome(code, tmp_path)
    assert os.path.realpath(one) in text
    assert other in text
    assert loaded == [os.path.realpath(one)], "the second one was loaded all the same"


# ---- the compiler of the wheels


def nvrtc_wheel(toolkit):
    name = {"cu12": "nvidia-cuda-nvrtc-cu12", "cu13": "nvidia-cuda-nvrtc"}[toolkit]
    found = vendor.wheels(name)
    if not found:
        vendor.missing(f"the wheel {name}")
    return found[-1]


def libnvrtc(toolkit):
    return str(nvrtc_wheel(toolkit).file(f"lib/libnvrtc.so.{toolkit.removeprefix('cu')}"))


@nvidia
@each_toolkit
def test_the_wheels_compiler_is_found_and_its_builtins_are_loaded_with_it(toolkit, tmp_path):
    wheel = nvrtc_wheel(toolkit)
    code = f"""
sys.path.insert(0, {str(wheel.folder)!r})
{FIND}found = _core.nvrtc_load(wheel_paths=libraries.nvrtc_wheels())
builtins = sorted({{line.split()[-1] for line in open("/proc/self/maps") if "nvrtc-builtins" in line}})
print(json.dumps([found, builtins]))
"""
    found, builtins = outcome(code, tmp_path)
    major, minor = wheel.version.split(".")[:2]
    assert found["path"] == os.path.realpath(libnvrtc(toolkit))
    assert found["version"] == 1000 * int(major) + 10 * int(minor)
    assert {80, 90, 100} <= set(found["archs"])
    assert builtins == [os.path.join(os.path.dirname(found["path"]), f"libnvrtc-builtins.so.{major}.{minor}")]


@nvidia
@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ({}, "cu13"),
        ({"driver_version": 13000}, "cu13"),
        ({"driver_version": 12040}, "cu12"),  # a driver of CUDA 12 takes no image of CUDA 13
        ({"arch": 89}, "cu13"),
        ({"arch": 70}, "cu12"),  # CUDA 13 knows nothing before sm_75
    ],
    ids=str,
)
def test_the_compiler_is_one_whose_images_driver_and_device_accept(asked, taken, tmp_path):
    paths = [libnvrtc("cu13"), libnvrtc("cu12")]
    code = f"print(json.dumps(_core.nvrtc_load(wheel_paths={paths}, **{asked})))"
    assert outcome(code, tmp_path)["path"] == os.path.realpath(libnvrtc(taken))


@nvidia
@pytest.mark.parametrize(
    ("asked", "text"),
    [({"driver_version": 12090}, "the driver serves only 12.9"), ({"arch": 70}, "does not know the device's sm_70")],
    ids=str,
)
def test_an_explicit_compiler_that_will_not_do_is_refused(asked, text, tmp_path):
    path = libnvrtc("cu13")
    code = f"print(json.dumps(raised(TransportUnavailable, lambda: _core.nvrtc_load({path!r}, **{asked}))))"
    said = outcome(code, tmp_path)
    assert text in said
    assert said.count(path) == 1, "each complaint once"
