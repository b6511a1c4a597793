"""What one rank does: the whole of data-parallel training with gpucomm, on two pages."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed

from gpucomm import DistributedDataParallel
from gpucomm.examples.train_lm import model as gpt
from gpucomm.examples.train_lm.options import Settings
from gpucomm.examples.train_lm.text import Text, TrainBatches, held_out_batches
from gpucomm.trainer import Trainer
from gpucomm.trainer.progress import print_line

WARMUP_STEPS = 20
CONSTANT_UNTIL = 200


def train(settings: Settings, text: Text) -> None:
    """Trains, and prints the figures and a sample on rank 0. The process group must exist."""
    model = build_model(settings)
    trainer = build_trainer(
        DistributedDataParallel(model, transport=settings.transport),
        settings,
        text,
        folder=settings.out,
        eval_every=settings.eval_every,
        checkpoint_every=settings.checkpoint_every,
    )
    if settings.resume:
        step = trainer.resume()
        say(f"resumed {settings.out} at step {step}")
    trainer.fit(settings.steps)
    print_sample(model, settings)


def build_model(settings: Settings) -> gpt.GPT:
    torch.manual_seed(settings.seed)  # the same weights on every rank
    return gpt.GPT(settings.shape)


def build_trainer(wrapped: torch.nn.Module, settings: Settings, text: Text, **options: Any) -> Trainer:
    """A trainer of the wrapped GPT: AdamW, warm-up and decay, clipping, this rank's batches."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Trainer(
        wrapped,
        torch.optim.AdamW(wrapped.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1),
        gpt.loss,
        TrainBatches(text, settings.batch_size, settings.block_size, settings.seed, rank),
        scheduler=lr_factor,
        accumulate=settings.accumulate,
        clip_norm=settings.clip,
        eval_batches=held_out_batches(text, settings.batch_size, settings.block_size, rank, world_size),
        average=mean_over_ranks,
        count_items=lambda batch: batch[0].numel(),
        items_name="bytes",
        progress=settings.progress,
        on_record=print_record,
        **options,
    )


def lr_factor(step: int) -> float:
    """Linear warm-up, then constant, then decay with the square root of the step. The run's length plays no part, so
    stopping after 100 steps and resuming up to 200 is the same as 200 at once."""
    return min((step + 1) / WARMUP_STEPS, math.sqrt(CONSTANT_UNTIL / max(step, CONSTANT_UNTIL)))


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    mean: float = total.item() / torch.distributed.get_world_size()
    return mean


def print_record(record: dict[str, Any]) -> None:
    if "eval_loss" in record:
        say(f"step {record['step']:>5}   held-out loss {record['eval_loss']:.4f}")


def print_sample(model: gpt.GPT, settings: Settings) -> None:
    if settings.sample_length and torch.distributed.get_rank() == 0:
        sample = gpt.generate(model, b"\n", settings.sample_length, settings.seed)
        say(f"--- sample of {settings.sample_length} bytes\n{printable(sample)}\n---")


def printable(sample: bytes) -> str:
    """As text; what is no text, and what would steer the terminal, as a replacement character."""
    characters = sample.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def say(line: str) -> None:
    """Prints on rank 0."""
    if torch.distributed.get_rank() == 0:
        print_line(line)


def use_cores(nproc: int) -> None:
    """Shares the cores out among the ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // nproc))
