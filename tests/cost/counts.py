"""What an iteration of the engine costs, in instructions: builds engine_cost.cpp, runs it under callgrind, adds up.

Counted are the instructions of the program itself, into which the engine, its parts for CUDA and NCCL and the C++
library are linked, and of what it calls of the C library, on the thread that calls mark_ready() and finish(). What
happens in calls of the stand-ins for the driver and NCCL is not counted; how many there are is.

    PYTHONPATH=tests python -m cost.counts      prints the table (`make test-cost` does so too)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from cost import callgrind
from cost.callgrind import Call, Function, Profile

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/cpp"  # of `make cpp-test` too
WARM_UP = 3  # iterations
PADDING = 200  # of engine_cost.cpp
FEW, MANY = 240, 480  # parameters; a launch of the pack kernel takes 504 gradients
BUCKETS = 48
KINDS = {"plain": "", "wire": ", wire_dtype", "norm": ", norm"}
ALLOCATIONS = ("malloc", "calloc", "realloc", "aligned_alloc", "memalign", "posix_memalign")


@dataclass(frozen=True)
class Cost:
    """Of one iteration, or of a part of it: means may be fractions."""

    instructions: float
    allocations: float
    driver_calls: float
    nccl_calls: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(mine - others for mine, others in zip(self._numbers(), other._numbers(), strict=True)))

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(mine * factor for mine in self._numbers()))

    def __truediv__(self, count: int) -> Cost:
        return Cost(*(mine / count for mine in self._numbers()))

    def _numbers(self) -> tuple[float, ...]:
        return self.instructions, self.allocations, self.driver_calls, self.nccl_calls


def build() -> Path:
    """The program, as a wheel is compiled. Raises RuntimeError with what the build said."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    options = ["-DGPUCOMM_BUILD_BINDINGS=OFF", "-DGPUCOMM_BUILD_TESTS=ON", "-DGPUCOMM_WERROR=ON"]
    jobs = str(min(4, os.cpu_count() or 1))
    for command in (
        ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *options, "--log-level=WARNING"],
        ["cmake", "--build", BUILD, "-j", jobs, "--target", "engine_cost"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"building engine_cost failed:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")
    return BUILD / "engine_cost"


@cache
def profiles(program: Path, parameters: int, buckets: int, kind: str) -> tuple[Profile, ...]:
    """One of each warm iteration."""
    function = "counted_iteration"
    with TemporaryDirectory() as folder:
        command = [
            "valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={folder}/dump", "--dump-line=no",
            "--separate-threads=yes", f"--toggle-collect={function}", f"--dump-after={function}",
            program, str(parameters), str(buckets), kind,
        ]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, "LD_BIND_NOW": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"engine_cost failed under valgrind:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        dumps = sorted(Path(folder).glob("dump.*-01"), key=lambda path: int(path.suffix[1:].split("-")[0]))
        return tuple(callgrind.read(dump) for dump in dumps[WARM_UP:])


def cost(program: Path, parameters: int, buckets: int, kind: str) -> Cost:
    """Of the cheapest warm iteration: what memory costs of the few that an iteration takes depends on malloc's past."""
    found = profiles(program, parameters, buckets, kind)
    return min((cost_in(profile, program) for profile in found), key=lambda cost: cost.instructions)


def per_gradient(program: Path, kind: str) -> Cost:
    """The slope over the gradients of one bucket."""
    return (cost(program, MANY, 1, kind) - cost(program, FEW, 1, kind)) / (MANY - FEW)


def per_bucket(program: Path, kind: str) -> Cost:
    """The slope over the buckets of as many gradients."""
    return (cost(program, MANY, BUCKETS, kind) - cost(program, MANY, 1, kind)) / (BUCKETS - 1)


def per_iteration(program: Path, kind: str) -> Cost:
    """What neither gradients nor buckets account for."""
    return cost(program, FEW, 1, kind) - per_gradient(program, kind) * FEW - per_bucket(program, kind)


def cost_in(profile: Profile, program: Path) -> Cost:
    out = calls_out_of(profile, program)
    libraries = [call for call in out if not is_stand_in(call.callee)]
    # Jumps to the C library that the linker made outside of what valgrind knows as the program.
    stubs = {call.callee for call in libraries if call.callee.object == "???"}
    # The hold on the device, which is the program's, and which the stand-ins ask.
    back = [call for call in profile.calls if is_stand_in(call.caller) and call.callee.object == str(program)]
    own = sum(count for function, count in profile.own.items() if function.object == str(program))

    def times(name: str) -> int:
        return sum(
            profile.calls[call] for call in out if is_stand_in(call.callee) and call.callee.name.startswith(name)
        )

    return Cost(
        instructions=own + sum(map(profile.inclusive.get, libraries)) - sum(map(profile.inclusive.get, back)),
        allocations=sum(
            profile.calls[call]
            for call in profile.calls
            if (call in libraries or call.caller in stubs) and call.callee.name.split("@")[0] in ALLOCATIONS
        ),
        driver_calls=times("cu"),
        nccl_calls=times("nccl"),
    )


def stand_in_calls(profile: Profile, program: Path) -> dict[str, int]:
    """Instructions that were spent in calls of the stand-ins, by the function that was called."""
    spent: Counter[str] = Counter()
    for call in calls_out_of(profile, program):
        if is_stand_in(call.callee):
            spent[call.callee.name] += profile.inclusive[call]
    return spent


def calls_out_of(profile: Profile, program: Path) -> list[Call]:
    return [
        call
        for call in profile.calls
        if call.caller.object == str(program) != call.callee.object and call.caller.name != "(below main)"
    ]


def is_stand_in(function: Function) -> bool:
    return Path(function.object).name.startswith(("libfake_cuda", "libfake_nccl"))


def has_valgrind() -> bool:
    return shutil.which("valgrind") is not None


def table(program: Path) -> str:
    lines = [f"{'':24}{'instructions':>14}{'allocations':>13}{'driver calls':>14}{'NCCL calls':>12}"]
    for kind, text in KINDS.items():
        for what, part in (("gradient", per_gradient), ("bucket", per_bucket), ("iteration", per_iteration)):
            row = part(program, kind)
            cells = f"{row.instructions:14.0f}{row.allocations:13.1f}{row.driver_calls:14.1f}{row.nccl_calls:12.1f}"
            lines.append(f"{what + text:24}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(build()))
