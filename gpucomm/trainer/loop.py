"""The training loop. It calls the model, the optimizer and the scheduler, and keeps count; it communicates nothing:
whatever wraps the model does that during backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel as AnyDistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from gpucomm.trainer.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    check_model,
    generator_states,
    restore_generators,
)
from gpucomm.trainer.checks import check_callable, check_count, check_positive
from gpucomm.trainer.feed import feed_from
from gpucomm.trainer.metrics import MetricsFile
from gpucomm.trainer.progress import Progress


@dataclass(frozen=True)
class StepResult:
    """What one training step did. `loss` is this rank's mean over the micro-batches, a scalar tensor on its device."""

    loss: torch.Tensor
    lr: float
    grad_norm: torch.Tensor | None
    items: int


class Trainer:
    """Trains `model` with `optimizer` on the losses that `loss(model, batch)` returns.

    Arguments:
        model: any Module; wrapped in gpucomm's or torch's DistributedDataParallel, or plain.
        optimizer: a torch optimizer over its parameters.
        loss: maps (model, batch) to a scalar tensor, the mean over the batch.
        batches: a callable from position (0, 1, 2, ...) to this rank's batch, or an iterable such as a DataLoader,
            gone through again and again. Either way a resumed run continues with the very next batch.
        scheduler: a torch scheduler of `optimizer`, stepped after every training step (ReduceLROnPlateau: every
            eval_every steps); or a callable from step to the factor on each group's initial learning rate.
        accumulate: micro-batches per step. All but the last run under the model's `no_sync()`.
        clip_norm: bound on the 2-norm of all gradients together; None leaves them alone.
        eval_batches: an iterable of batches of this rank for evaluation, gone through every time.
        eval_every, checkpoint_every, log_every: a period in steps; 0 means never. `fit` also does the first two at its
            end, if it does them at all.
        folder: where `metrics.jsonl` (rank 0) and `checkpoints/` go; None writes nothing.
        average: maps a float to its mean over the ranks; called on every rank at the same points, with the loss of a
            logged step and with the evaluation loss. None: each rank keeps its own figure.
        count_items: maps a batch to the number of `items_name` in it, for the throughput in the metrics.
        progress: on rank 0, a progress bar on stderr if that is a terminal, else a line on stdout every ten seconds.
        on_record: called on rank 0 with every record of the metrics.

    Rank and world size are those of the default process group of torch.distributed, or 0 and 1 without one.

    Raises TypeError and ValueError with the offending value.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        batches: Callable[[int], Any] | Iterable[Any],
        *,
        scheduler: LRScheduler | ReduceLROnPlateau | Callable[[int], float] | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        eval_batches: Iterable[Any] | None = None,
        eval_every: int = 0,
        checkpoint_every: int = 0,
        log_every: int = 1,
        folder: str | Path | None = None,
        average: Callable[[float], float] | None = None,
        count_items: Callable[[Any], int] | None = None,
        items_name: str = "samples",
        progress: bool = True,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {model!r}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {optimizer!r}")
        check_callable("loss", loss)
        for name, function in [("average", average), ("count_items", count_items), ("on_record", on_record)]:
            if function is not None:
                check_callable(name, function)
        if eval_every and eval_batches is None:
            raise ValueError(f"eval_every is {eval_every}, but there are no eval_batches")
        if checkpoint_every and folder is None:
            raise ValueError(f"checkpoint_every is {checkpoint_every}, but there is no folder to write to")
        if isinstance(scheduler, ReduceLROnPlateau) and not eval_every:
            raise ValueError("scheduler: ReduceLROnPlateau follows the evaluation loss, so it needs eval_every > 0")

        self.model = model
        self.optimizer = optimizer
        self.scheduler = _scheduler_from(scheduler, optimizer)
        self.step = 0
        """Training steps finished so far."""
        self._loss = loss
        self._feed = feed_from(batches)
        self._accumulate = check_count("accumulate", accumulate, minimum=1)
        self._clip_norm = None if clip_norm is None else check_positive("clip_norm", clip_norm)
        self._eval_batches = eval_batches
        self._eval_every = check_count("eval_every", eval_every)
        self._checkpoint_every = check_count("checkpoint_every", checkpoint_every)
        self._log_every = check_count("log_every", log_every)
        self._average = average or (lambda value: value)
        self._count_items = count_items or (lambda batch: 0)
        self._items_name = items_name
        self._progress = progress
        self._on_record = on_record

        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._world_size = torch.distributed.get_world_size() if distributed else 1
        self._metrics = MetricsFile(Path(folder) / "metrics.jsonl") if folder and self._rank == 0 else None
        self._checkpoints = (
            CheckpointFolder(Path(folder) / "checkpoints", self._rank, self._world_size) if folder else None
        )

    def fit(self, steps: int) -> None:
        """Trains until `self.step` is `steps`, with evaluation, metrics and checkpoints on the way."""
        check_count("steps", steps)
        seconds, steps_timed = 0.0, 0
        try:
            with contextlib.closing(self._progress_to(steps)) as progress:
                while self.step < steps:
                    log, evaluate, save = (
                        self._is_due(self._log_every, steps),
                        self._is_due(self._eval_every, steps),
                        self._is_due(self._checkpoint_every, steps),
                    )
                    start = time.perf_counter()
                    result = self.train_step()
                    loss = result.loss.item() if log else None  # waits for the device, so it belongs into the time
                    seconds, steps_timed = seconds + time.perf_counter() - start, steps_timed + 1

                    if loss is not None:
                        self._log(result, loss, seconds / steps_timed)
                        progress.advance(loss=f"{loss:.4f}")
                        seconds, steps_timed = 0.0, 0
                    else:
                        progress.advance()
                    if evaluate:
                        self._evaluate_and_log()
                    if save:
                        self.save()
        finally:
            if self._metrics is not None:
                self._metrics.close()

    def train_step(self) -> StepResult:
        """One training step: `accumulate` forwards and backwards, clipping, optimizer, scheduler.

        Raises whatever the model, the loss or the communication raises. The step does not count then, and can be tried
        again with the next batches.
        """
        self.model.train()
        grad_norm = None
        lr = self.optimizer.param_groups[0]["lr"]
        try:
            loss, items = self._accumulate_gradients()
            if self._clip_norm is not None:
                grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()  # also after a failure: a later step must not add to this one's remains
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.step += 1
        return StepResult(loss, lr, grad_norm, items)

    def evaluate(self) -> float:
        """Mean loss over `eval_batches` in eval mode without gradients, averaged over the ranks by `average`."""
        if self._eval_batches is None:
            raise ValueError("evaluate: the trainer was given no eval_batches")
        module = unwrapped(self.model)  # a wrapper's forward may communicate, and ranks may hold different counts
        module.eval()
        with torch.no_grad():
            losses = [self._loss(module, batch).item() for batch in self._eval_batches]
        if not losses:
            raise ValueError("eval_batches: the iterable is empty")
        return self._average(sum(losses) / len(losses))

    def save(self) -> None:
        """Writes a checkpoint of this step into `folder`. Call it on every rank; see [Note: complete checkpoints]."""
        if self._checkpoints is None:
            raise ValueError("save: the trainer was given no folder")
        module = unwrapped(self.model)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        shared = {
            "model": module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }
        local = {
            "buffers": {name: value for name, value in module.state_dict().items() if name not in parameters},
            "generators": generator_states(),
            "place": self._feed.place(),
        }
        self._checkpoints.save(self.step, shared, local)

    def resume(self) -> int:
        """Loads the newest complete checkpoint in `folder`, and returns its step. What follows is bitwise what would
        have followed had the run not stopped, if the model itself is deterministic.

        Raises CheckpointError if there is none, it is damaged, or it does not fit this model and world size. If it is
        damaged, the message says whether the one before is intact, and what to delete to resume from there.
        """
        if self._checkpoints is None:
            raise ValueError("resume: the trainer was given no folder")
        step = self._checkpoints.latest()
        if step is None:
            raise CheckpointError(f"{self._checkpoints}: no complete checkpoint")
        shared, local = self._checkpoints.load(step)
        if (shared["scheduler"] is None) != (self.scheduler is None):
            raise CheckpointError("one of the checkpoint and the trainer has a scheduler, the other has none")
        module, state = unwrapped(self.model), {**shared["model"], **local["buffers"]}
        check_model(module, state)
        module.load_state_dict(state)
        self.optimizer.load_state_dict(shared["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(shared["scheduler"])
        self._feed.seek(local["place"])
        restore_generators(local["generators"])  # last: seeking draws from them
        self.step = step
        self._checkpoints.discard_after(step)
        if self._metrics is not None:
            self._metrics.rewind(step)
        return step

    def _accumulate_gradients(self) -> tuple[torch.Tensor, int]:
        """Forward and backward of every micro-batch; gradients are reduced over the ranks in the last one only."""
        total: torch.Tensor | None = None
        items = 0
        for micro in range(self._accumulate):
            batch = self._feed.draw()
            items += self._count_items(batch)
            is_last = micro == self._accumulate - 1
            with contextlib.nullcontext() if is_last else _no_sync(self.model):
                loss = self._loss(self.model, batch)
                if self._accumulate > 1:
                    loss = loss / self._accumulate
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total, items

    def _progress_to(self, steps: int) -> Progress:
        return Progress(steps, self.step, shown=self._progress and self._rank == 0)

    def _is_due(self, every: int, steps: int) -> bool:
        """Whether the step about to run is a multiple of `every`, or the last."""
        number = self.step + 1
        return every > 0 and (number % every == 0 or number == steps)

    def _log(self, result: StepResult, loss: float, seconds: float) -> None:
        record = {"step": self.step, "loss": self._average(loss), "lr": result.lr, "step_s": seconds}
        if result.items:
            record[f"{self._items_name}_per_s"] = result.items * self._world_size / seconds
        if result.grad_norm is not None:
            record["grad_norm"] = result.grad_norm.item()
        self._write(record)

    def _evaluate_and_log(self) -> None:
        start = time.perf_counter()
        loss = self.evaluate()
        # Not in the extra evaluation at the end of a fit, which a run that goes on would not have had.
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.step % self._eval_every == 0:
            self.scheduler.step(loss)
        self._write({"step": self.step, "eval_loss": loss, "eval_s": time.perf_counter() - start})

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(record)
        if self._on_record is not None and self._rank == 0:
            self._on_record(record)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside a DistributedDataParallel, gpucomm's or torch's; any other module itself."""
    return model.module if isinstance(model, AnyDistributedDataParallel) else model


def _no_sync(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    return no_sync()


def _scheduler_from(
    scheduler: LRScheduler | ReduceLROnPlateau | Callable[[int], float] | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | ReduceLROnPlateau | None:
    if scheduler is None:
        return None
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        if scheduler.optimizer is not optimizer:
            raise ValueError(f"scheduler: {scheduler!r} belongs to another optimizer")
        return scheduler
    check_callable("scheduler", scheduler)
    return LambdaLR(optimizer, scheduler)
