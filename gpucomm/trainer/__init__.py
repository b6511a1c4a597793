"""A thin training loop around any torch module, wrapped for data parallelism or not."""

from gpucomm.trainer.checkpoint import CheckpointError
from gpucomm.trainer.loop import Trainer

__all__ = ["CheckpointError", "Trainer"]
