"""gpucomm: a communication layer for data-parallel training in PyTorch."""

from gpucomm.version import __version__

__all__ = ["__version__"]
