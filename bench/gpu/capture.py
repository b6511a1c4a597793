"""A whole iteration (forward, backward with its reductions, optimizer) captured as a CUDA graph and replayed, against
the same iterations run one by one."""

from collections.abc import Callable

import torch
from torch import nn

from gpu.device import Gpu
from gpu.group import joined
from gpu.place import Place
from gpu.report import Report
from gpu.training import SMALL, TINY, batch, deterministic, language_model, same, wrapped

_WARM_UP_STEPS = 11  # as many as torch's own documentation asks for with DDP
_STEPS = 10


def run(place: Place, report: Report) -> None:
    deterministic()
    with joined(place) as ranks:
        gpu = ranks.gpu
        plain = language_model(gpu, TINY if gpu.dry_run else SMALL)
        models = []
        for captures in (True, False):
            with gpu.side_stream():
                model = wrapped("ours", plain)
                iteration = iteration_of(gpu, model)
                for _ in range(_WARM_UP_STEPS):
                    iteration()
            gpu.synchronize()
            replay, done = gpu.captured(iteration) if captures else (iteration, 0)
            for _ in range(_STEPS - done):
                replay()
            gpu.synchronize()
            models.append(model)
        pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
        close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
        moved = not same(models[0], plain)
        report.row("replayed", close and moved, bitwise=same(models[0], models[1]))


def iteration_of(gpu: Gpu, model: nn.Module) -> Callable[[], None]:
    shape = TINY if gpu.dry_run else SMALL
    inputs = batch(gpu, shape, 4, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def iteration() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(*inputs).backward()
        optimizer.step()

    return iteration
