"""Optimizers that step in one pass over each parameter: torch.optim's classes, and Lion and LAMB."""

from gpucomm.optim.adam import Adam
from gpucomm.optim.adamw import AdamW
from gpucomm.optim.lamb import LAMB
from gpucomm.optim.lion import Lion
from gpucomm.optim.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Lion"]
