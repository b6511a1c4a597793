"""compute-sanitizer over the checks of the kernels (tests/kernel_checks.py), where that tool is there and works."""

import os
import re
import shutil
import subprocess
import sys

from gpu.parts import NotRun
from gpu.place import ROOT, Place
from gpu.report import Report

# Each tensor is memory of its own then: an access past its end is one past the end of the memory.
_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# By tool: its options, and what it says at its end. Torch asks the driver for functions that not every driver has.
_TOOLS = {
    "memcheck": (["--report-api-errors", "no"], r"ERROR SUMMARY: (\d+) error"),
    "racecheck": ([], r"RACECHECK SUMMARY: (\d+) hazard"),
}
_GRACE_S = 5.0


def run(place: Place, report: Report) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise NotRun("there is no compute-sanitizer on the path")
    program = [sys.executable, str(ROOT / "tests/kernel_checks.py"), "--few"]
    program += ["--stand-in"] if place.dry_run else []
    limit_s = (place.left_s - _GRACE_S) / len(_TOOLS)
    for tool, (options, summary) in _TOOLS.items():
        command = [sanitizer, "--tool", tool, *options, *program]
        try:
            ran = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
                env=os.environ | _ENVIRONMENT,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            raise NotRun(f"{tool} was not done after {limit_s:.0f} s") from expired
        print(ran.stdout, flush=True)
        report.row(tool, findings(tool, summary, ran.stdout, ran.returncode), status=ran.returncode)


def findings(tool: str, summary: str, text: str, status: int) -> int:
    """How much the tool found, from what it wrote. Raises NotRun where it did not work."""
    found = re.search(summary, text)
    if found is None or "Device not supported" in text:
        lines = [line for line in text.splitlines() if line.strip()]
        said = next((line for line in lines if "not supported" in line), lines[-1] if lines else "nothing")
        raise NotRun(f"{tool} does not work here: {said.strip('= ')}")
    count = int(found.group(1))
    if status and not count:
        raise RuntimeError(f"{tool} found nothing, but the checks ended with status {status}")
    return count
