"""Ranks are forked from this process (ranks.py), so it stays single-threaded: a forked OpenMP pool hangs."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Imported by the first forward of stock DDP: once here, not in each forked rank.
import torch._dynamo

torch.set_num_threads(1)
