"""Where NVIDIA's wheels keep their libraries: found here, loaded by the engine, which knows no Python packages."""

from importlib.util import find_spec
from pathlib import Path

# Packages of the wheels, without and with a folder of CUDA 13's own.
_NVRTC = (("nvidia.cu13", "libnvrtc.so.13"), ("nvidia.cuda_nvrtc", "libnvrtc.so.12"))


def nccl_wheel() -> str:
    """The path of libnccl.so.2 in the wheel nvidia-nccl-cu12 or -cu13; empty without one."""
    return next(iter(_files("nvidia.nccl", "libnccl.so.2")), "")


def nvrtc_wheels() -> list[str]:
    """Paths of the compilers in the wheels nvidia-cuda-nvrtc (CUDA 13) and nvidia-cuda-nvrtc-cu12, the newest first."""
    return [path for package, library in _NVRTC for path in _files(package, library)]


def _files(package: str, library: str) -> list[str]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # no package `nvidia` at all
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    # A folder that is on the path twice is listed twice.
    paths = dict.fromkeys(Path(folder) / "lib" / library for folder in folders or ())
    return [str(path) for path in paths if path.is_file()]
