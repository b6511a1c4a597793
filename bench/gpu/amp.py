"""Automatic mixed precision at world size 1, ours beside stock DDP: autocast in bf16, and in fp16 with a GradScaler
whose scale begins so high that the first steps overflow and are left out."""

from typing import Any

import torch
from torch import nn

from gpu.device import Gpu
from gpu.group import joined
from gpu.place import Place
from gpu.report import Report
from gpu.training import SMALL, TINY, batch, deterministic, language_model, same, wrapped

_STEPS = 10
_FIRST_SCALE, _BACKOFF = 2.0**32, 1 / 16


def run(place: Place, report: Report) -> None:
    deterministic()
    with joined(place) as ranks:
        gpu = ranks.gpu
        plain = language_model(gpu, TINY if gpu.dry_run else SMALL)
        ours, stock = (trained(gpu, wrapped(arm, plain), torch.bfloat16, None) for arm in ("ours", "stock"))
        report.row("bfloat16", ours[1:] == stock[1:] and same(ours[0], stock[0]), losses=ours[1], stock=stock[1])
        ours, stock = (trained(gpu, wrapped(arm, plain), torch.float16, scaler(gpu)) for arm in ("ours", "stock"))
        report.row("float16", ours[1:] == stock[1:] and same(ours[0], stock[0]), scales=ours[2], losses=ours[1])
        left_out = [scale < before for before, scale in zip([_FIRST_SCALE, *ours[2]], ours[2], strict=False)]
        report.row("overflowed", any(left_out) and not all(left_out) and not same(ours[0], plain), left_out=left_out)


def scaler(gpu: Gpu) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(gpu.type, init_scale=_FIRST_SCALE, backoff_factor=_BACKOFF, growth_interval=3)


def trained(gpu: Gpu, model: nn.Module, dtype: torch.dtype, scaler: Any) -> tuple[nn.Module, list[float], list[float]]:
    """The model, its losses, and the scale after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = batch(gpu, TINY if gpu.dry_run else SMALL, 4, seed=3)
    losses, scales = [], []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        with torch.autocast(gpu.type, dtype=dtype):
            loss = model(*inputs)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        losses.append(loss.item())
    return model, losses, scales
