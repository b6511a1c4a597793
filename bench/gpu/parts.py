"""The parts of the check, in the order in which they run while there is time, and the rows that each has to fill.

A part is a module with a function run(place, report). It has processes and a time of its own, so what
becomes of one leaves the others alone. Nothing here imports torch: the process that starts the parts stays small.
"""

from dataclasses import dataclass

from gpu.rows import Row


class NotRun(Exception):
    """Raised by a part that cannot run here: the text says why. Not a failure."""


@dataclass(frozen=True)
class Part:
    """limit_s: its processes are ended then. ranks: that many processes, all on the one GPU.

    killed: ranks that are to die by SIGKILL. needs_package: not before gpucomm is there.
    """

    name: str
    module: str
    what: str
    limit_s: float
    rows: tuple[Row, ...]
    ranks: int = 1
    killed: tuple[int, ...] = ()
    needs_package: bool = True


PACKED = (("large", "16 large tensors"), ("small", "10,000 small tensors"))
PACKED_PAIRS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))


def _packing_rows() -> tuple[Row, ...]:
    rows = [Row("copy", "device copy, read and written", "GB/s"), Row("packed_right", "packed as torch packs")]
    for key, text in PACKED:
        rows += [
            Row(f"{key}_{a}_{b}", f"pack with norm and finite check, {text}, {a} to {b}", "% of copy", at_least=85)
            for a, b in PACKED_PAIRS
        ]
    return (*rows, Row("small_stock", "the small ones, against stock's copy of each", "times faster", at_least=3))


MACHINE = Part(
    "machine",
    "gpu.machine",
    "what is here",
    60,
    (Row("gpu", "a GPU that torch and the driver serve"),),
    needs_package=False,
)

PARTS = (
    Part(
        "build",
        "gpu.build",
        "from source, without a network",
        150,
        (
            Row("built", "gpucomm is built and loads"),
            Row("fat_binary", "kernels compiled by nvcc meanwhile"),
            Row("build_s", "time to build", "s"),
        ),
        needs_package=False,
    ),
    Part("kernels", "gpu.kernels", "pack, 512 MiB in all", 40, _packing_rows()),
    Part(
        "world_one",
        "gpu.world_one",
        "a step of a GPT of 124 M in bf16, batch 8 x 1024, world size 1",
        60,
        (
            Row("right", "gradients are the bare model's, but for rounding"),
            Row("bare_ms", "the bare model", "ms"),
            Row("ours_percent", "ours over the bare model", "%", at_most=1),
            Row("stock_percent", "stock DDP over the bare model", "%"),
            Row("views_percent", "stock DDP with gradient_as_bucket_view", "%"),
        ),
    ),
    Part(
        "host_cost",
        "gpu.host_cost",
        "processor time of the host, world size 1",
        40,
        (
            Row("right", "every gradient, each time"),
            Row("gradient_us", "a gradient, over an empty hook", "us", at_most=2),
            Row("bucket_us", "a bucket", "us", at_most=8),
            Row("stock_gradient_us", "stock DDP: a gradient", "us"),
            Row("stock_bucket_us", "stock DDP: a bucket", "us"),
        ),
    ),
    Part(
        "two_ranks",
        "gpu.shared_gpu",
        "2 ranks on the one GPU, NCCL between them",
        60,
        (
            Row("same_losses", "20 losses and the parameters bitwise stock DDP's"),
            Row("same_on_ranks", "parameters equal on the ranks"),
            Row("learned", "the losses fall"),
            Row("step_ms", "a step (GPU shared in time slices)", "ms"),
        ),
        ranks=2,
    ),
    Part(
        "abort",
        "gpu.abort",
        "one of 3 ranks on the GPU is killed",
        60,
        (
            Row("raised_s", "until the last survivor has raised", "s", at_most=5),
            Row("new_communicator", "the survivors reduce over a new one"),
            Row("connected_s", "time to make it", "s"),
        ),
        ranks=3,
        killed=(1,),
    ),
    Part(
        "suite",
        "gpu.suite",
        "the tests for a GPU",
        90,
        (
            Row("failed", "tests that failed", "tests", at_most=0),
            Row("passed", "tests that passed", "tests", at_least=1),
        ),
    ),
    Part(
        "memory",
        "gpu.memory",
        "device memory, the GPT of 124 M in bf16",
        40,
        (
            Row("arenas", "ours beyond the bare model's peak, of its gradients' size", "times", at_most=1.05),
            Row("stock_arenas", "stock DDP", "times"),
            Row("made_in_a_step", "tensors made in a step beyond the bare model's", "tensors", at_most=0),
            Row("grown_bytes", "other device memory, grown over 10 steps", "bytes", at_most=0),
        ),
    ),
    Part(
        "amp",
        "gpu.amp",
        "autocast beside stock DDP, world size 1",
        40,
        (
            Row("bfloat16", "bf16: 10 losses and the parameters bitwise"),
            Row("float16", "fp16 with GradScaler: the same, and its scales"),
            Row("overflowed", "fp16: some steps were left out for an overflow, others not"),
        ),
    ),
    Part(
        "capture",
        "gpu.capture",
        "a whole iteration as a CUDA graph, world size 1",
        40,
        (Row("replayed", "10 iterations replayed leave the parameters of 10 that were not"),),
    ),
    Part(
        "four_ranks",
        "gpu.shared_gpu",
        "4 ranks on the one GPU, NCCL between them",
        60,
        (
            Row("difference", "largest difference to stock DDP's losses", "ppm", at_most=10),
            Row("same_on_ranks", "parameters equal on the ranks"),
            Row("learned", "the losses fall"),
            Row("step_ms", "a step (GPU shared in time slices)", "ms"),
        ),
        ranks=4,
    ),
    Part(
        "compiled",
        "gpu.compiled",
        "torch.compile of the wrapped model, world size 1",
        80,
        (
            Row("difference", "largest difference to the gradients of the bare model", "ppm", at_most=1000),
            Row("compile_s", "first iteration", "s"),
        ),
    ),
    Part(
        "sanitizer",
        "gpu.sanitizer",
        "compute-sanitizer on the kernels' checks",
        90,
        (
            Row("memcheck", "errors that memcheck finds", "errors", at_most=0),
            Row("racecheck", "hazards that racecheck finds", "hazards", at_most=0),
        ),
    ),
)
