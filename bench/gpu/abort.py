"""Three ranks train on the GPU; one is killed in the middle of a backward. The others must raise, soon, although their
GPU waits in a collective for a peer that is gone; and make a communicator of their own with which they go on."""

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from gpu.group import Ranks, joined, leave_together
from gpu.place import Place
from gpu.report import Report
from gpu.training import SLOW_WIRE, TINY, batch, language_model, wrapped
from gpucomm import Communicator
from gpucomm.errors import CommError

_VICTIM = 1
_LAST_WORDS = "killed at"
_STEPS_BEFORE = 5
_GIVE_UP_S = 30.0


def run(place: Place, report: Report) -> None:
    with joined(place) as ranks:
        shape = TINY if ranks.gpu.dry_run else SLOW_WIRE
        model = wrapped("ours", language_model(ranks.gpu, shape), timeout=_GIVE_UP_S, bucket_cap_mb=0.5)
        inputs = batch(ranks.gpu, shape, 2, seed=ranks.rank)
        for _ in range(_STEPS_BEFORE):
            model(*inputs).backward()
        ranks.everybody("ready", True)
        if ranks.rank == _VICTIM:
            die_within(ranks, lambda: model(*inputs).backward(), model)
        error = error_of(lambda: model(*inputs).backward(), ranks)
        raised_at = time.monotonic()
        survivors = [rank for rank in range(ranks.size) if rank != _VICTIM]
        killed_at = float(ranks.store.get(_LAST_WORDS))
        sums, connected_s = start_again(ranks, survivors)
        mine = [raised_at - killed_at, sums, connected_s, error]
        everybody = ranks.everybody("survived", mine, survivors)
        if ranks.rank == 0:
            report.row("raised_s", max(one[0] for one in everybody), errors=[one[3] for one in everybody])
            report.row("new_communicator", all(one[1] for one in everybody))
            report.row("connected_s", max(one[2] for one in everybody))
        leave_together(ranks, survivors)


def die_within(ranks: Ranks, iteration: Callable[[], None], model: nn.Module) -> None:
    """Half of this rank's gradients are there, and some are on their way."""
    params = list(model.parameters())

    def die(_: torch.Tensor) -> None:
        ranks.store.set(_LAST_WORDS, str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    params[len(params) // 2].register_post_accumulate_grad_hook(die)
    iteration()


def error_of(iteration: Callable[[], None], ranks: Ranks) -> str:
    """What ends the iterations: one of gpucomm's errors, at the latest where the host reads what its GPU has made."""
    deadline = time.monotonic() + _GIVE_UP_S
    try:
        while time.monotonic() < deadline:
            iteration()
            ranks.gpu.synchronize()
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"no error within {_GIVE_UP_S:g} s of a peer's death")


def start_again(ranks: Ranks, survivors: list[int]) -> tuple[bool, float]:
    """Whether the survivors' sum is right, and how long the way there was."""
    started = time.monotonic()
    group = dist.new_group(survivors, backend="gloo", use_local_synchronization=True)
    with Communicator(group, transport="nccl", timeout=_GIVE_UP_S) as comm:
        x = torch.full((1000,), ranks.rank + 1.0, device=ranks.gpu.torch_device)
        comm.all_reduce(x)
        expected = float(sum(rank + 1 for rank in survivors))
        return bool((x == expected).all()), time.monotonic() - started
