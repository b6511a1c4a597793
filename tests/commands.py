"""Python processes for tests: they find the package where pytest has found it, whatever folder they run in."""

import os
import subprocess
import sys


def environment(first_path=(), **variables):
    """os.environ with the variables; first_path comes before what PYTHONPATH holds, made absolute."""
    inherited = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, first_path), *inherited])} | variables


def run_python(*arguments, cwd, timeout_s=120, env=None):
    """The finished process, with its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd, env=env or environment(), capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def gpucomm_run(*arguments, cwd, **options):
    return run_python("-m", "gpucomm", "run", *arguments, cwd=cwd, **options)
