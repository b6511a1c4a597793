"""What is here: the GPU, its driver, and the versions of what runs on it."""

import os
import platform
import re
import shutil
import subprocess

import torch

from gpu.device import missing_gpu
from gpu.parts import NotRun
from gpu.place import Place
from gpu.report import Report


def run(place: Place, report: Report) -> None:
    report.facts(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        nvcc=nvcc_version(),
        compute_sanitizer=shutil.which("compute-sanitizer"),
    )
    if place.dry_run:
        from fake_cuda.control import build

        build()  # here, where there is time
        report.facts(gpu="a stand-in", nccl_version=0)
        report.row("gpu", True)
        return
    if (missing := missing_gpu()) is not None:
        raise NotRun(missing)
    properties = torch.cuda.get_device_properties(0)
    report.facts(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        driver=driver_version(),
        nccl_version=nccl_version(),
    )
    report.row("gpu", bool(torch.ones(1, device="cuda").item() == 1))


def nccl_version() -> int:
    """Of the NCCL that torch uses: 22809 is 2.28.9."""
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return 10000 * major + 100 * minor + patch


def driver_version() -> str | None:
    """As the driver's own program says, or its module."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if ran.returncode == 0:
            return ran.stdout.splitlines()[0].strip()
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\d+\.\d+(\.\d+)*", file.read())
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None
    return found.group() if found else None


def nvcc_version() -> str | None:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        ran = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\S+),", ran.stdout)
    return found.group(1) if found else None
