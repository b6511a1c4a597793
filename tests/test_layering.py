"""Who may include, import and call what, read from the sources: a forbidden edge fails here, not in review."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "gpucomm"

# A layer includes itself and those before it.
CPP_LAYERS = ("core", "kernels", "cuda", "nccl", "transport", "engine", "optim", "bindings")
# Suffixes of files that are compiled, or included, for one architecture or instruction set only.
ARCHITECTURES = ("_x86", "_aarch64", "_avx2", "_avx512", "_f16c", "_neon")

# Private members of torch that the package uses; all are in torch from 2.6 on. See there before you add one: members of
# torch's DistributedDataParallel in particular come and go.
TORCH_PRIVATE = {
    "_C", "_allgather_base", "_assign_modules_buffers", "_build_params_for_reducer", "_cdata", "_check_default_group",
    "_cuda_getCurrentRawStream",
    "_check_input_dim", "_check_non_zero_input_channels", "_check_sync_bufs_post_fwd", "_check_sync_bufs_pre_fwd",
    "_current_graph_task_id", "_device_types", "_execution_engine", "_foreach_mul_", "_foreach_norm", "_fp_param",
    "_get_backend",
    "_get_process_group_store", "_get_sequence_number_for_group", "_in_backward_optimizers", "_inside_ddp_forward",
    "_join_config", "_lazy_init", "_mp_param", "_nnz", "_parameters", "_post_accumulate_grad_hooks", "_timeout",
    "_values", "_version", "_will_engine_execute_node", "_world",
}  # fmt: skip
# os, sys, our own extension, Lightning's strategies
OTHERS_PRIVATE = {"_attach_gpu", "_exit", "_getframe", "_release", "_ddp_kwargs", "_determine_ddp_device_ids"}


def cpp_files():
    return sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".cu"})


def python_files():
    return sorted(PACKAGE.rglob("*.py"))


def name(path):
    return path.relative_to(ROOT).as_posix()


def includes(path):
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def code(text):
    """C++ source with comments and string literals blanked, so that only code is searched."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda found: " " if found.group().startswith("/") else '""', text, flags=re.DOTALL)


def imports(tree):
    """(absolute module or module.name, node) of every import in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def is_under(module, package):
    return module == package or module.startswith(package + ".")


# ---- the rules, each a function from sources to complaints, so that they are tested on wrong sources too


def wrong_includes(layer, included):
    """Complaints about what a file of the given csrc folder includes."""
    found = []
    for header in included:
        folder = header.split("/")[0]
        if folder in CPP_LAYERS and "/" in header and CPP_LAYERS.index(folder) > CPP_LAYERS.index(layer):
            found.append(f"{layer} includes {header} of a later layer")
        if re.match(r"torch/|ATen/|c10/|cuda\.h|cuda_runtime|nccl\.h", header):
            found.append(f"includes {header}: the engine knows neither torch nor toolkits")
        if layer != "bindings" and re.match(r"pybind11/|Python\.h", header):
            found.append(f"includes {header}: only bindings may")
    return found


def wrong_calls(text):
    """Complaints about calls in C++ code that no file of csrc may make."""
    # A bare abort() is Transport's own.
    ending = r"(?:std::|(?<!\w)::)(?:exit|_exit|_Exit|quick_exit|abort|terminate)\s*\(|(?<![\w.>:])_?exit\s*\("
    printing = r"(?<![\w.>])(?:printf|puts|putchar|perror|vprintf)\s*\("
    rules = {
        r"\b(?:secure_)?getenv\s*\(|\benviron\b": "reads the environment",
        rf"\bstd::(?:cout|cerr|clog)\b|{printing}": "prints",
        r"\b(?:stdout|stderr)\b": "uses the terminal's files",
        ending: "ends the process",
    }
    return [what for pattern, what in rules.items() if re.search(pattern, code(text))]


def wrong_imports(path, tree):
    """Complaints about the imports of a file of the package; path is relative to it."""
    parts = path.split("/")
    found = []
    for module, node in imports(tree):
        if is_under(module, "triton"):
            if parts[-1] != "kernels.py":
                found.append(f"imports {module}: only kernels.py files may")
            elif node in tree.body:
                found.append(f"imports {module} when it is imported itself: must be lazy")
        if is_under(module, "gpucomm.ddp") and parts[0] == "reduction":
            found.append(f"reduction imports {module}: the wrapper is built on it")
        if is_under(module, "gpucomm._core"):
            if parts[0] == "trainer":
                found.append("trainer uses gpucomm._core")
            if parts[0] == "optim" and not re.fullmatch(r"gpucomm\._core\.optim(\.\w+)?", module):
                found.append(f"optim uses {module}: only gpucomm._core.optim is meant for it")
    return found


def reads_environment(tree):
    names = {"environ", "environb", "getenv"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
        for node in ast.walk(tree)
    )


def private_members_of_others(trees):
    """Names of private attributes that the given sources read or write and nowhere define, on self or a wrapper."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    written = {ast.unparse(node) for node in attributes if isinstance(node.ctx, ast.Store)}
    defined |= {node.attr for node in attributes if {f"self.{node.attr}", f"ddp.{node.attr}"} & written}
    return {node.attr for node in attributes if re.match(r"_[^_]", node.attr)} - defined


# ---- the sources keep them


@pytest.mark.parametrize("path", cpp_files(), ids=name)
def test_includes_go_from_later_layers_to_earlier_ones(path):
    assert wrong_includes(path.relative_to(CSRC).parts[0], includes(path)) == []


@pytest.mark.parametrize("path", cpp_files(), ids=name)
def test_the_engine_neither_prints_nor_exits_nor_reads_the_environment(path):
    assert wrong_calls(path.read_text()) == []


def test_only_cuda_py_touches_torch_cuda_and_it_is_small():
    def uses(tree):
        return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda" for node in ast.walk(tree))

    users = [name(path) for path in python_files() if uses(ast.parse(path.read_text()))]
    assert users == ["gpucomm/cuda.py"]
    assert len((PACKAGE / "cuda.py").read_text().splitlines()) < 150


def test_every_source_lies_in_a_layer():
    strangers = [name(path) for path in cpp_files() if path.relative_to(CSRC).parts[0] not in CPP_LAYERS]
    assert strangers == []


@pytest.mark.parametrize("path", cpp_files(), ids=name)
def test_intrinsics_are_in_files_chosen_by_architecture(path):
    specific = r"intrin\.h$|cpuid\.h|arm_neon|arm_sve|(" + "|".join(ARCHITECTURES) + r")\.h$"
    included = [header for header in includes(path) if re.search(specific, header)]
    assert not included or path.stem.endswith(ARCHITECTURES), f"{name(path)} includes {included}"


def test_only_world_reads_the_environment():
    # Not counted: examples are programs, and a program may look whether torchrun started it.
    files = [path for path in python_files() if path.relative_to(PACKAGE).parts[0] != "examples"]
    readers = [name(path) for path in files if reads_environment(ast.parse(path.read_text()))]
    assert readers == ["gpucomm/world.py"]


def test_private_members_of_torch_are_those_that_all_its_versions_have():
    used = private_members_of_others([ast.parse(path.read_text()) for path in python_files()])
    assert used == TORCH_PRIVATE | OTHERS_PRIVATE


@pytest.mark.parametrize("path", python_files(), ids=name)
def test_imports_of_the_package_keep_their_layers(path):
    assert wrong_imports(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())) == []


def test_importing_is_silent_and_starts_no_thread():
    script = (
        "import os, sys, time\n"
        "import torch, torch.distributed\n"  # torch's own threads and seconds are not counted
        "threads, loaded = len(os.listdir('/proc/self/task')), set(sys.modules)\n"
        "started = time.perf_counter()\n"
        "import gpucomm\n"
        "seconds = time.perf_counter() - started\n"
        "assert len(os.listdir('/proc/self/task')) == threads, 'importing started a thread'\n"
        "slow = {'triton', 'matplotlib', 'cupy', 'mpi4py', 'pynvml'} & (set(sys.modules) - loaded)\n"
        "assert not slow, f'importing pulled in {slow}'\n"
        "assert seconds < 2, f'importing took {seconds:.1f} s beyond torch'\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:gpucomm", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# ---- and are able to fail


@pytest.mark.parametrize(
    ("layer", "header"),
    [
        ("core", "kernels/kernels.h"),
        ("transport", "engine/engine.h"),
        ("engine", "bindings/errors.h"),
        ("bindings", "torch/extension.h"),
        ("kernels", "pybind11/pybind11.h"),
        ("core", "Python.h"),
        ("transport", "cuda.h"),
    ],
)
def test_a_forbidden_include_is_found(layer, header):
    assert wrong_includes(layer, [header])


def test_allowed_includes_are_not_complained_about():
    assert wrong_includes("engine", ["core/types.h", "transport/transport.h", "engine/bucket.h", "vector"]) == []
    assert wrong_includes("bindings", ["pybind11/pybind11.h", "engine/engine.h"]) == []


@pytest.mark.parametrize(
    "line",
    [
        'auto* v = std::getenv("X");',
        "std::cerr << 1;",
        'printf("x");',
        'std::fprintf(stderr, "x");',
        "exit(1);",
        "std::abort();",
        "::_exit(0);",
        "_exit(code);",
        'std::printf("x");',
        "std::terminate();",
    ],
)
def test_a_forbidden_call_is_found(line):
    assert wrong_calls(line)


@pytest.mark.parametrize(
    "line",
    [
        "// printf(x); exit(1);",
        'throw Error("do not exit(1); or std::cerr");',
        "transport.abort();",
        "void abort();",
        "abort();",
        "transport->abort();",
        "virtual void abort() = 0;",
        "std::snprintf(text, sizeof text, format);",
    ],
)
def test_an_allowed_line_is_not_complained_about(line):
    assert wrong_calls(line) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ddp/wrapper.py", "import triton"),
        ("reduction/reducer.py", "from gpucomm.ddp.replicas import broadcast_tensors"),
        ("optim/kernels.py", "import triton.language as tl"),
        ("trainer/loop.py", "from gpucomm import _core"),
        ("trainer/loop.py", "def f():\n    import gpucomm._core"),
        ("optim/adamw.py", "from gpucomm._core import Engine"),
    ],
)
def test_a_forbidden_import_is_found(path, source):
    assert wrong_imports(path, ast.parse(source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("optim/kernels.py", "def f():\n    import triton"),
        ("ddp/wrapper.py", "from gpucomm import _core"),
        ("ddp/wrapper.py", "from gpucomm.reduction.reducer import Reducer"),
        ("optim/adamw.py", "from gpucomm._core import optim"),
    ],
)
def test_an_allowed_import_is_not_complained_about(path, source):
    assert wrong_imports(path, ast.parse(source)) == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['X']", "from os import environ", "import os\nos.getenv('X')"]
)
def test_reading_the_environment_is_found(source):
    assert reads_environment(ast.parse(source))


def test_private_members_of_others_are_told_from_our_own():
    source = """
class A:
    def _f(self):
        self._x = torch._C
    def g(self):
        self._f(self._x, self._y)
"""
    assert private_members_of_others([ast.parse(source)]) == {"_C", "_y"}
