"""torch.compile around the wrapped model: gradients against those of the bare one, which is not compiled."""

import time

from gpu.group import joined
from gpu.place import Place
from gpu.report import Report
from gpu.training import SMALL, TINY, batch, language_model, largest_difference, step, wrapped


def run(place: Place, report: Report) -> None:
    with joined(place) as ranks:
        gpu = ranks.gpu
        shape = TINY if gpu.dry_run else SMALL
        plain = language_model(gpu, shape)
        inputs = batch(gpu, shape, 4, seed=3)
        bare, ours = wrapped("bare", plain), wrapped("ours", plain)
        step(bare, inputs)
        model = gpu.compiled(ours)
        started = time.perf_counter()
        step(model, inputs)
        gpu.synchronize()
        report.row("compile_s", time.perf_counter() - started)
        for _ in range(2):
            step(model, inputs)
        report.row("difference", largest_difference(ours, bare) * 1e6)
