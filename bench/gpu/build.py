"""gpucomm built from the checkout, without a network, with the machine's own tools: by pip into a folder, else by
CMake alone. In a dry run the one that is here already is taken."""

import os
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

from gpu.place import ROOT, Place
from gpu.report import Report

_LOADED = """
import json, gpucomm
from gpucomm import _core
print(json.dumps([gpucomm.__version__, gpucomm.__file__, len(_core.cuda_fat_binary()), _core.isa]))
"""


def run(place: Place, report: Report) -> None:
    site = place.folder / "site"
    started = time.monotonic()
    if place.dry_run:
        ways = {"the one that is here": None}
    else:
        ways = {"pip": with_pip(site), "cmake": with_cmake(site, place.folder / "cmake")}
    said = {}
    for way, commands in ways.items():
        said[way] = "" if commands is None else first_failure(commands)
        if not said[way]:
            break
    else:
        raise RuntimeError("; ".join(f"{way}: {text}" for way, text in said.items()))
    seconds = time.monotonic() - started
    version, file, fat_binary_bytes, isa = loaded(site)
    report.facts(way=way, said=said, version=version, file=file, isa=isa)
    report.row("built", True, way=way)
    report.row("fat_binary", fat_binary_bytes > 0, bytes=fat_binary_bytes)
    report.row("build_s", seconds)


def with_pip(site: Path) -> list[list[str]]:
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    return [[*pip, "--disable-pip-version-check", "--target", str(site), str(ROOT)]]


def with_cmake(site: Path, build: Path) -> list[list[str]]:
    """The extension beside a copy of the package."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DCMAKE_INSTALL_PREFIX={site}", *headers_of_torch(build)]
    return [
        configure,
        ["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)],
        ["cmake", "--install", str(build)],
        ["cp", "-r", "--update", str(ROOT / "gpucomm"), str(site)],
    ]


def headers_of_torch(build: Path) -> list[str]:
    """Where pybind11 is not installed: a package for CMake over the headers that torch brings."""
    if util.find_spec("pybind11") is not None:
        return []
    (torch,) = util.find_spec("torch").submodule_search_locations or [""]
    package = build / "pybind11"
    package.mkdir(parents=True)
    (package / "pybind11Config.cmake").write_text(_PYBIND11.format(include=Path(torch) / "include"))
    (package / "pybind11ConfigVersion.cmake").write_text("set(PACKAGE_VERSION_COMPATIBLE TRUE)\n")
    return [f"-Dpybind11_DIR={package}"]


_PYBIND11 = """
function(pybind11_add_module name)
  list(REMOVE_ITEM ARGN MODULE NO_EXTRAS)
  Python_add_library(${{name}} MODULE WITH_SOABI ${{ARGN}})
  target_include_directories(${{name}} SYSTEM PRIVATE "{include}")
endfunction()
"""


def first_failure(commands: list[list[str]]) -> str:
    """Runs them in turn; what the first that failed wrote last, empty if none did."""
    environment = os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    for name in ("PYTHONPATH", "LD_PRELOAD"):  # for what is built, not for what builds
        environment.pop(name, None)
    for command in commands:
        try:
            ran = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        print(ran.stdout, flush=True)
        if ran.returncode:
            lines = [line for line in ran.stdout.splitlines() if line.strip()]
            return f"{' '.join(command[:4])} ended with status {ran.returncode}: {lines[-1] if lines else ''}"
    return ""


def loaded(site: Path) -> tuple[str, str, int, str]:
    """Version, file, bytes of the fat binary and instruction set of the gpucomm that the parts will have."""
    import json

    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _LOADED]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError("gpucomm does not load: " + (ran.stderr.strip().splitlines() or ["no word"])[-1])
    return tuple(json.loads(ran.stdout))
