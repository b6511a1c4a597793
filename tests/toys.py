"""Small models and batches for tests: deterministic, distinct per rank and iteration."""

import torch
from torch import nn


def batch(rank: int, iteration: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + rank + 1)
    return torch.randn(*shape, generator=generator)


def mlp(width: int = 24, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 6, 6)
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 10).long() % 11
        return self.head(self.mix(self.embed(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(len(x), -1, 6))[0])


class TwoHeads(nn.Module):
    """Uses only the head that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x: torch.Tensor, head: int | None = 0) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        return x if head is None else self.heads[head](x)
