"""Device memory of a GPT of 124 M parameters in bf16: what each wrapper takes beyond the bare model at its peak, in
units of the gradients' size (one arena), and whether anything is made in a step that the bare model does not make.

Ours come from NCCL's allocator or the driver, not from torch's, so the device itself is asked. What a communicator
takes by itself is measured with a wrapper around a tiny model, and taken off.
"""

import gc

import torch
from torch import Tensor, nn

from gpu.device import Gpu
from gpu.group import joined
from gpu.place import Place
from gpu.report import Report
from gpu.training import GPT_124M, TINY, batch, language_model, step, wrapped

_WARM_UP_STEPS = 3
_STEPS = 10


def run(place: Place, report: Report) -> None:
    with joined(place) as ranks:
        gpu = ranks.gpu
        shape = TINY if gpu.dry_run else GPT_124M
        plain = language_model(gpu, shape, torch.bfloat16)
        inputs = batch(gpu, shape, 2, seed=2)
        arena_bytes = sum(param.nbytes for param in plain.parameters())
        of_itself(gpu, "ours")  # the first one brings libraries and kernels
        bare = measured(gpu, plain, "bare", inputs)
        for arm, row in (("ours", "arenas"), ("stock", "stock_arenas")):
            own_bytes = of_itself(gpu, arm)
            found = measured(gpu, plain, arm, inputs)
            beyond = found["peak_bytes"] - bare["peak_bytes"] + found["other_bytes"] - own_bytes
            report.row(row, beyond / arena_bytes, arena_bytes=arena_bytes, own_bytes=own_bytes, bare=bare, found=found)
            if arm == "ours":
                report.row("made_in_a_step", (found["made"] - bare["made"]) / _STEPS)
                report.row("grown_bytes", found["grown_bytes"])


def of_itself(gpu: Gpu, arm: str) -> int:
    """Bytes of the device that a wrapper takes whatever its model, torch's tensors aside."""
    tiny = nn.Linear(4, 4, device=gpu.torch_device)
    before = gpu.memory().other_bytes
    model = wrapped(arm, tiny)
    for _ in range(_WARM_UP_STEPS):
        model.zero_grad(set_to_none=True)
        model(torch.ones(2, 4, device=gpu.torch_device)).sum().backward()
    taken = gpu.memory().other_bytes - before
    del model
    gc.collect()
    return taken


def measured(gpu: Gpu, plain: nn.Module, arm: str, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """peak_bytes of torch's tensors; other_bytes that came with the wrapper; what ten steps made, and grew."""
    gpu.forget_peak()
    before = gpu.memory()
    model = wrapped(arm, plain)
    for _ in range(_WARM_UP_STEPS):
        step(model, inputs)
    warm = gpu.memory()
    for _ in range(_STEPS):
        step(model, inputs)
    after = gpu.memory()
    found = {
        "peak_bytes": after.peak_bytes,
        "other_bytes": after.other_bytes - before.other_bytes,
        "made": after.made - warm.made,
        "grown_bytes": after.other_bytes - warm.other_bytes,
    }
    del model
    gc.collect()
    gpu.forget_peak()
    return found
