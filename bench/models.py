"""The models of the benchmarks: what data-parallel jobs are made of, each with a fixed batch per rank.

A workload is a module whose forward returns the loss, and its inputs. Seeds: the parameters' is the same on all
ranks, the batch's is the rank's. Nothing is random after construction, so every step of every arm yields the same
gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpucomm.examples.train_lm import model as gpt_model


@dataclass
class Workload:
    module: nn.Module
    inputs: tuple[Tensor, ...]


class Regression(nn.Module):
    """A body and the mean square of its output's distance to a target."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), target)


class Classification(nn.Module):
    """A body that returns logits [batch, classes], and the cross entropy."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), target)


def layers(count: int, width: int, batch: int) -> Workload:
    """`count` linear layers of width x width with biases: 2 count tensors."""
    body = nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(width, width), nn.Tanh())])
    return Workload(Regression(body), (torch.randn(batch, width), torch.randn(batch, width)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """The example's GPT; forward(tokens, targets), both [batch, length], gives the loss."""

    def __init__(self, shape: gpt_model.Shape):
        super().__init__()
        self.body = gpt_model.GPT(shape)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return gpt_model.loss(self.body, (tokens, targets))


def gpt(shape: gpt_model.Shape, batch: int) -> Workload:
    tokens = torch.randint(256, (batch, shape.block_size // 2 + 1))
    return Workload(LanguageModel(shape), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))


def convnet(width: int, stages: int, batch: int) -> Workload:
    """Stages of two 3x3 convolutions with BatchNorm, each twice as wide on a quarter of the pixels; 32 x 32 images."""
    parts: list[nn.Module] = []
    channels = 3
    for stage in range(stages):
        out = width << stage
        for stride in (1 if stage == 0 else 2, 1):
            parts += [nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
    body = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))
    return Workload(Classification(body), (torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))))


class Lstm(nn.Module):
    """Embedding, LSTM, head over 1,000 words; forward(tokens, targets) gives the loss."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(1000, width), nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(tokens))[0]).flatten(0, 1), targets.flatten())


def lstm(width: int, depth: int, length: int, batch: int) -> Workload:
    tokens = torch.randint(1000, (2, batch, length))
    return Workload(Lstm(width, depth), (tokens[0], tokens[1]))


class Tied(nn.Module):
    """A large embedding used at both ends, with little between: the gradient is one big tensor that is ready last."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embedding(tokens))) / 16, targets)


def tied(words: int, width: int, batch: int) -> Workload:
    tokens = torch.randint(words, (2, batch))
    return Workload(Tied(words, width), (tokens[0], tokens[1]))


class Vit(nn.Module):
    """Patches of 4 x 4, mean pooling; logits over 100 classes."""

    def __init__(self, depth: int, width: int, heads: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def vit(depth: int, width: int, heads: int, batch: int) -> Workload:
    body = Vit(depth, width, heads)
    return Workload(Classification(body), (torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))))


class Deep(nn.Module):
    """`count` linear modules, each beside a residual connection, so that gradients keep their size all the way down."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x).tanh() / len(self.parts)
        return x


def deep(count: int, width: int, batch: int) -> Workload:
    return Workload(Regression(Deep(count, width)), (torch.randn(batch, width), torch.randn(batch, width)))


# Name -> (as measured, as in a smoke run).
WORKLOADS: dict[str, tuple[Callable[[], Workload], Callable[[], Workload]]] = {
    "tensors240": (lambda: layers(120, 128, 64), lambda: layers(120, 16, 4)),
    "mlp16.8m": (lambda: layers(16, 1024, 64), lambda: layers(16, 64, 4)),
    "gpt10m": (lambda: gpt(gpt_model.PRESETS["medium"], 2), lambda: gpt(gpt_model.Shape(2, 2, 32, 16), 1)),
    "convnet": (lambda: convnet(64, 4, 8), lambda: convnet(8, 2, 2)),
    "lstm": (lambda: lstm(512, 2, 32, 16), lambda: lstm(32, 2, 4, 2)),
    "tied": (lambda: tied(32768, 256, 64), lambda: tied(512, 16, 8)),
    "vit": (lambda: vit(6, 192, 3, 4), lambda: vit(2, 32, 2, 1)),
    "layer64m": (lambda: layers(1, 8000, 4), lambda: layers(1, 256, 2)),
}
# Beside them, of bench_unused: 1,000 modules.
OTHERS: dict[str, tuple[Callable[[], Workload], Callable[[], Workload]]] = {
    "modules1000": (lambda: deep(1000, 64, 64), lambda: deep(10, 8, 2)),
}


def build(name: str, rank: int, quick: bool) -> Workload:
    """The workload of `name`: parameters equal on all ranks, the batch this rank's own."""
    make = (WORKLOADS | OTHERS)[name][1 if quick else 0]
    torch.manual_seed(1)
    module = make().module
    torch.manual_seed(1000 + rank)
    return Workload(module, make().inputs)
