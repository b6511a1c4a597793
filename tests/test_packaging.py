"""What is installed and what is shipped."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import gpucomm

ROOT = Path(__file__).parent.parent


def test_the_version_is_written_once_and_agrees_everywhere():
    written = re.search(r'__version__ = "([^"]+)"', (ROOT / "gpucomm/version.py").read_text()).group(1)
    assert gpucomm.__version__ == written
    assert metadata.version("gpucomm") == written
    assert re.search(rf"^## {re.escape(written)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_installed_package_says_that_it_is_typed():
    assert (Path(gpucomm.__file__).parent / "py.typed").exists()


def test_requirements_are_those_promised():
    requires = metadata.requires("gpucomm")
    plain = {requirement for requirement in requires if "extra ==" not in requirement}
    assert "torch>=2.6" in plain
    names = {re.match(r"[\w.-]+", requirement).group() for requirement in plain}
    assert names <= {"torch", "numpy", "tqdm"}
    extras = set(metadata.metadata("gpucomm").get_all("Provides-Extra"))
    assert {"cu12", "cu13", "bench", "test", "lint", "dev"} <= extras
    assert metadata.metadata("gpucomm")["Requires-Python"] == ">=3.10"


def test_constraints_pin_every_package_that_make_installs():
    pins = (ROOT / "requirements/constraints.txt").read_text()
    pinned = {re.split("==", line)[0].lower() for line in pins.splitlines() if "==" in line}
    for part in ("run", "build", "test", "lint", "bench", "clients"):
        listed = subprocess.run(
            [sys.executable, "tools/requirements_of.py", part], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        assert listed
        assert {re.match(r"[\w-]+", requirement).group().lower() for requirement in listed} <= pinned


def test_no_package_index_is_named_in_the_project():
    # Users and mirrors choose their index through pip's own configuration.
    for path in ("pyproject.toml", "requirements/constraints.txt", "Makefile", "tools/setup.sh", ".ci/run"):
        if (ROOT / path).exists():
            assert not re.search(r"index-url|find-links|extra-index|https?://", (ROOT / path).read_text()), path


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="one instruction set on this architecture")
def test_objects_above_the_baseline_share_no_code_with_the_others(tmp_path):
    # Of a weak symbol (an inline function, a template of the standard library) the linker keeps one copy for the whole
    # program: with AVX-512 in it, an older processor would die on it. -O0 inlines nothing, so none can hide.
    subprocess.run(
        [sys.executable, "-m", "cmake", "-S", ROOT, "-B", tmp_path, "-G", "Unix Makefiles",
         "-DGPUCOMM_BUILD_BINDINGS=OFF"],
        check=True, capture_output=True,
    )  # fmt: skip
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    above = [entry for entry in commands if "-mavx" in entry["command"]]
    assert len(above) == 2
    for entry in above:
        words = shlex.split(entry["command"])
        target = tmp_path / "checked.o"
        words[words.index("-o") + 1] = str(target)
        subprocess.run([*words, "-O0"], cwd=entry["directory"], check=True)
        listed = subprocess.run(["nm", "-C", target], capture_output=True, text=True, check=True).stdout
        # nm: capital letters and u, v, w are seen by the linker; U is used from elsewhere.
        symbols = re.findall(r"^[0-9a-f ]+ ([A-Zuvw]) (.*)$", listed, re.MULTILINE)
        defined = [name for kind, name in symbols if kind != "U"]
        assert len(defined) == 1, defined
        assert re.fullmatch(r"gpucomm::kAvx\w+Kernels", defined[0])
        used = {name for kind, name in symbols if kind == "U"}
        assert used <= {"memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_"}


@pytest.fixture(scope="module")
def shipped():
    """Names in a wheel and an sdist built from this checkout, with the versions of the build tools installed here."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        for kind in ("--sdist", "--wheel"):
            subprocess.run(
                [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder],
                cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
            )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        (sdist,) = Path(folder).glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            wheel_names = archive.namelist()
        with tarfile.open(sdist) as archive:
            sdist_names = [member.name.split("/", 1)[1] for member in archive.getmembers()]
        yield wheel_names, sdist_names


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_one_extension(shipped):
    names, _ = shipped
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gpucomm").rglob("*.py*") if path.suffix != ".pyc"}
    assert sources <= set(names)
    assert len([entry for entry in names if entry.endswith(".so")]) == 1
    outside = [entry for entry in names if not re.match(r"gpucomm/|gpucomm-[\d.]+\.dist-info/", entry)]
    assert outside == []
    assert any(entry.endswith("LICENSE") for entry in names)


@pytest.mark.slow
def test_the_sdist_holds_what_building_and_testing_need_and_nothing_built(shipped):
    _, names = shipped
    for needed in ("CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "csrc/core/types.h", "gpucomm/py.typed"):
        assert needed in names
    assert "tests/ranks.py" in names
    assert [entry for entry in names if re.search(r"\.(so|o|pyc|whl)$|^build/|^\.venv/|^runs/", entry)] == []
