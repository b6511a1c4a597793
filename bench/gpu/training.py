"""Small and large GPTs, and what the parts do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from models import LanguageModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

from gpu.device import Gpu
from gpucomm import DistributedDataParallel as Ours
from gpucomm.examples.train_lm.model import PRESETS, Shape

GPT_124M = PRESETS["gpt2"]
SMALL = PRESETS["small"]  # 3 M parameters
SLOW_WIRE = PRESETS["tiny"]  # 1 M, where ranks share a GPU in time slices
TINY = Shape(layers=2, heads=2, width=16, block_size=8)  # for dry runs

WRAPPERS: dict[str, Callable[..., nn.Module]] = {"stock": StockDdp, "ours": Ours}


def language_model(gpu: Gpu, shape: Shape, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Equal on all ranks: forward(tokens, targets) gives the loss."""
    with gpu.on_host():
        torch.manual_seed(1)
        model = LanguageModel(shape)
    return model.to(gpu.torch_device, dtype)


def batch(gpu: Gpu, shape: Shape, size: int, seed: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [size, length]."""
    length = length or shape.block_size
    with gpu.on_host():
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(shape.vocabulary, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous().to(gpu.torch_device), tokens[:, 1:].contiguous().to(gpu.torch_device)


def wrapped(name: str, module: nn.Module, **arguments: Any) -> nn.Module:
    """A copy of the module, in the wrapper of that name; "bare": in none."""
    module = copy.deepcopy(module)
    return module if name == "bare" else WRAPPERS[name](module, **arguments)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Forward and backward, with fresh gradients."""
    model.zero_grad(set_to_none=True)
    model(*inputs).backward()


def same(first: nn.Module, second: nn.Module) -> bool:
    """Whether parameters are equal, bit for bit."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def largest_difference(model: nn.Module, expected: nn.Module) -> float:
    """Of the gradients, parameter by parameter: the norm of the difference over that of what is expected."""
    found = []
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        if param.grad is None or other.grad is None:
            raise AssertionError("a gradient is missing")
        difference = (param.grad.float() - other.grad.float()).norm()
        found.append(float(difference / other.grad.float().norm().clamp_min(1e-30)))
    return max(found)


def deterministic() -> None:
    """From here on, in this process: equal work gives equal bits; torch warns of what does not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # Attention by matrix products alone.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
