"""Stock DistributedDataParallel and gpucomm's beside each other: two replicas of the same model, with the same weights
and the same batches, in the same ranks, taking turns step by step. Turns cancel what a shared machine does meanwhile;
who goes first alternates too.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel as StockDistributedDataParallel

from gpucomm import DistributedDataParallel
from gpucomm.examples.train_lm.options import Settings
from gpucomm.examples.train_lm.text import Text
from gpucomm.examples.train_lm.train import build_model, build_trainer, print_sample, say
from gpucomm.trainer import Trainer
from gpucomm.trainer.files import write_atomically
from gpucomm.trainer.metrics import MetricsFile
from gpucomm.trainer.progress import Progress

UNTIMED_STEPS = 5  # at the start: allocation, threads, and stock's and our re-planning after the first backward
TRIAL_STEPS = 7


@dataclass
class Arm:
    """One of the two replicas, and what its steps took and gave on this rank."""

    name: str
    model: torch.nn.Module
    trainer: Trainer
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        torch.distributed.barrier()  # both ranks start together, so that no arm pays for the other's stragglers
        start = time.perf_counter()
        result = self.trainer.train_step()
        self.losses.append(result.loss.item())
        self.seconds.append(time.perf_counter() - start)

    def slowest_seconds(self) -> list[float]:
        """Each step's time as the slowest rank saw it; the same list on every rank."""
        slowest = torch.tensor(self.seconds, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        return slowest.tolist()


def compare(settings: Settings, text: Text) -> None:
    """Trains both replicas for settings.steps, and prints the table and a sample on rank 0."""
    views = better_views_setting(settings, text)
    stock = stock_arm(settings, text, views)
    model = build_model(settings)
    wrapped = DistributedDataParallel(model, transport=settings.transport)
    ours = Arm(f"gpucomm ({wrapped.transport})", model, build_trainer(wrapped, settings, text, folder=settings.out))

    take_turns(stock, ours, settings)
    ours.trainer.save()
    report(stock, ours, settings, views)
    print_sample(model, settings)


def stock_arm(settings: Settings, text: Text, views: bool) -> Arm:
    model = build_model(settings)
    wrapped = StockDistributedDataParallel(model, gradient_as_bucket_view=views)
    return Arm("stock DDP (gloo)", model, build_trainer(wrapped, settings, text))


def better_views_setting(settings: Settings, text: Text) -> bool:
    """Stock DDP's faster gradient_as_bucket_view for this model, from a short trial in turns; equal on every rank."""
    arms = {views: stock_arm(settings, text, views) for views in (True, False)}
    for _ in range(TRIAL_STEPS):
        for arm in arms.values():
            arm.step()
    medians = {views: statistics.median(arm.slowest_seconds()) for views, arm in arms.items()}
    return min(medians, key=lambda views: medians[views])


def take_turns(stock: Arm, ours: Arm, settings: Settings) -> None:
    is_first_rank = torch.distributed.get_rank() == 0
    progress = Progress(settings.steps, 0, shown=settings.progress and is_first_rank)
    with closing(progress), closing(MetricsFile(Path(settings.out) / "metrics.jsonl")) as metrics:
        for step in range(1, settings.steps + 1):
            for arm in (stock, ours) if step % 2 else (ours, stock):
                arm.step()
            losses = {"loss": ours.losses[-1], "stock_loss": stock.losses[-1]}
            if is_first_rank:
                metrics.write({"step": step, **losses, "step_s": ours.seconds[-1], "stock_step_s": stock.seconds[-1]})
            progress.advance(**{name: f"{loss:.4f}" for name, loss in losses.items()})
            if step % settings.eval_every == 0 or step == settings.steps:
                our_loss, stock_loss = ours.trainer.evaluate(), stock.trainer.evaluate()
                say(f"step {step:>5}   held-out loss {our_loss:.4f}   stock {stock_loss:.4f}")


def report(stock: Arm, ours: Arm, settings: Settings, stock_views: bool) -> None:
    """Prints the table, and writes it to compare.json. stock_views: stock's gradient_as_bucket_view."""
    times = {arm.name: arm.slowest_seconds()[UNTIMED_STEPS:] or arm.slowest_seconds() for arm in (stock, ours)}
    stock_times, our_times = times.values()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = medians[ours.name] / medians[stock.name]
    paired = statistics.median(mine / theirs for mine, theirs in zip(our_times, stock_times, strict=True))
    losses_equal = equal_on_every_rank(ours.losses == stock.losses)
    weights_equal = equal_on_every_rank(
        all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True)
        )
    )

    say(f"\n{settings.preset}, {settings.nproc} ranks, {len(our_times)} timed steps of each, slowest rank per step")
    say(
        f"stock DDP: torch's class with gradient_as_bucket_view={stock_views}, the faster setting for this model in "
        f"{TRIAL_STEPS} steps of each beforehand"
    )
    say(f"{'':20} {'median step':>12} {'10 % to 90 % of steps':>24}")
    for name, seconds in times.items():
        low, high = spread(seconds)
        say(f"{name:20} {1e3 * medians[name]:>9.1f} ms {1e3 * low:>13.1f} - {1e3 * high:.1f} ms")
    say(f"ratio of the medians, ours / stock: {ratio:.3f}   median of the paired ratios: {paired:.3f}")
    say(f"losses of all {len(ours.losses)} steps bitwise equal: {'yes' if losses_equal else 'NO'}")
    say(f"final weights bitwise equal: {'yes' if weights_equal else 'NO'}")
    if settings.nproc > 2 and not losses_equal:
        say("(on more than 2 ranks gloo adds in another order than rank 0, 1, 2, ...: the last bits differ)")
    if torch.distributed.get_rank() == 0:
        result = {
            "median_step_s": medians,
            "stock_gradient_as_bucket_view": stock_views,
            "ratio": ratio,
            "paired_ratio": paired,
            "losses_equal": losses_equal,
            "weights_equal": weights_equal,
        }
        content = json.dumps(result, indent=1).encode()
        write_atomically(Path(settings.out) / "compare.json", lambda file: file.write(content))


def spread(seconds: list[float]) -> tuple[float, float]:
    """The 10 % and the 90 % quantile."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def equal_on_every_rank(equal: bool) -> bool:
    everywhere = torch.tensor(int(equal))
    torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN)
    return bool(everywhere)
