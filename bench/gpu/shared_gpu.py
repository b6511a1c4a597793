"""Several ranks on the one GPU, NCCL between them: 20 steps of a small GPT in stock DDP, then the same in ours.

Both with deterministic algorithms. On two ranks a sum has one order, so every loss and the parameters are to be equal
bit for bit; on more the order is NCCL's own for each message, and ours have other bounds.
"""

import hashlib
import time

import torch
from torch import nn

from gpu.device import Gpu
from gpu.group import Ranks, joined, leave_together
from gpu.place import Place
from gpu.report import Report
from gpu.training import SLOW_WIRE, TINY, batch, deterministic, language_model, wrapped
from gpucomm import _core

_STEPS = 20
_BATCH = 4
_CAP_MB = 1.0  # several buckets


def run(place: Place, report: Report) -> None:
    deterministic()
    with joined(place) as ranks:
        plain = language_model(ranks.gpu, TINY if ranks.gpu.dry_run else SLOW_WIRE)
        ours, ours_s, ours_digest = train(ranks, wrapped("ours", plain, bucket_cap_mb=_CAP_MB))
        stock, stock_s, stock_digest = train(ranks, wrapped("stock", plain, bucket_cap_mb=_CAP_MB))
        report.facts(nccl=_core.nccl_load())
        everybody = ranks.everybody("trained", [ours, stock, ours_digest, stock_digest])
        if ranks.rank == 0:
            alike = all(len({one[i] for one in everybody}) == 1 for i in (2, 3))
            report.row("same_on_ranks", alike, stock_digest=stock_digest, ours_digest=ours_digest)
            report.row("learned", all(sum(one[0][-5:]) < sum(one[0][:5]) for one in everybody), losses=ours)
            ms = {"ours": ours_s / _STEPS * 1e3, "stock": stock_s / _STEPS * 1e3}
            report.row("step_ms", ms["ours"], ms=ms)
            if ranks.size == 2:
                report.row("same_losses", all(one[0] == one[1] and one[2] == one[3] for one in everybody), stock=stock)
            else:
                report.row("difference", max(difference(one[0], one[1]) for one in everybody), stock=stock)
        leave_together(ranks)


def train(ranks: Ranks, model: nn.Module) -> tuple[list[float], float, str]:
    """Losses of this rank, seconds, and a digest of the parameters."""
    gpu: Gpu = ranks.gpu
    shape = TINY if gpu.dry_run else SLOW_WIRE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = [batch(gpu, shape, _BATCH, seed=100 * ranks.rank + i) for i in range(4)]
    losses = []
    started = time.perf_counter()
    for i in range(_STEPS):
        optimizer.zero_grad()
        loss = model(*inputs[i % len(inputs)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    gpu.synchronize()
    return losses, seconds, digest(model)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def difference(first: list[float], second: list[float]) -> float:
    """The largest, in millionths."""
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True)) * 1e6
