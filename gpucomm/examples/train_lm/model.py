"""A byte-level GPT: pre-norm blocks, causal attention, the output layer tied to the token table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT. Bytes use the first 256 rows of the token table, however many it has."""

    layers: int
    heads: int
    width: int
    block_size: int
    vocabulary: int = BYTES


PRESETS = {
    "tiny": Shape(layers=5, heads=4, width=128, block_size=64),  # 1 M parameters
    "small": Shape(layers=4, heads=4, width=256, block_size=128),  # 3 M
    "medium": Shape(layers=8, heads=5, width=320, block_size=256),  # 10 M
    "gpt2": Shape(layers=12, heads=12, width=768, block_size=1024, vocabulary=50257),  # 124 M, GPT-2's own shape
}


class GPT(nn.Module):
    """Maps tokens, int64 [batch, time], to logits, float [batch, time, vocabulary]; time is at most block_size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.block_size, shape.width)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialise)
        for block in blocks:  # the residual stream is a sum of 2 * layers terms: keep its variance at 1
            for output in (block.attention.out, block.mlp.narrow):
                nn.init.normal_(output.weight, std=0.02 / (2 * shape.layers) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow: torch.Tensor = self.narrow(functional.gelu(self.widen(x)))
        return narrow


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        by_head = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = by_head.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy per byte, in nats, of predicting `targets` from `inputs`."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> bytes:
    """`length` bytes drawn from the model after `prompt` (not empty), the same ones for the same seed."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-model.shape.block_size :]])
        logits = model(window)[0, -1, :BYTES] / temperature
        tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
    return bytes(tokens[len(prompt) :])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
