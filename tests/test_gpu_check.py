"""bench/gpu_check.py: goes through all of its parts over the stand-ins, and survives parts that do not."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu import environment, sanitizer
from gpu.parts import MACHINE, PARTS, NotRun, Part
from gpu.results import Results
from gpu.rows import Row
from gpu.runner import Outcome, Runner
from gpu.timing import interleaved, paired, spread

BENCH = Path(__file__).resolve().parent.parent / "bench"

# Does what the real one does for a program without errors: runs it, and says so.
SANITIZER = """#!/bin/sh
while [ "${1#*python}" = "$1" ]; do tool="$tool $1"; shift; done
"$@" || exit 1
case "$tool" in
  *racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
  *) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""

NEEDS_A_COMPILER = pytest.mark.skipif(
    not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")), reason="no compiler for the stand-ins"
)


def check(*options, **variables):
    command = [sys.executable, str(BENCH / "gpu_check.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, env=os.environ | variables, check=False)


@NEEDS_A_COMPILER
@pytest.mark.timeout(600)  # 40 s, but where others work too
def test_a_dry_run_goes_through_every_part_and_fills_every_row(tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    out = tmp_path / "out.json"
    done = check(
        "--dry-run", "--budget-s", "570", "--out", str(out), PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["dry_run"] is True
    assert [part["name"] for part in found["parts"]] == [part.name for part in (MACHINE, *PARTS)]
    for part, expected in zip(found["parts"], (MACHINE, *PARTS), strict=True):
        assert part["status"] == "done", part
        assert [row["name"] for row in part["rows"]] == [row.name for row in expected.rows]
        for row in part["rows"]:
            assert row["dry_run_value"] is not None, row
            assert row["value"] is None, "what a dry run yields is no measurement"
            assert row["met"] is None
            if not row["unit"] and row["name"] != "fat_binary":  # which a build without nvcc has not
                assert row["dry_run_value"] is True, row
    assert "nothing was measured" in done.stdout


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may find a GPU")
def test_without_a_gpu_a_run_says_so_and_fails(tmp_path):
    out = tmp_path / "out.json"
    done = check("--out", str(out))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        f"gpu_check: no GPU can be used: torch {torch.__version__} is built without CUDA"
    )
    assert [part["status"] for part in json.loads(out.read_text())["parts"]] == ["not run"]


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--parts", "kernel", "part 'kernel'"),
        ("--nccl", "/nowhere/x", "'/nowhere/x'"),
        ("--part", "x", "--part"),
    ],
)
def test_an_option_that_cannot_be_served_is_an_error_naming_it(option, value, named):
    done = check(option, value)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]


# ---- parts that do not go well


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path, time.monotonic() + 100, False, {"PYTHONPATH": str(Path(__file__).parent)}, lambda rank: {})


ROWS = (Row("first", "a number", "us", at_most=2), Row("second", "a check"))


def part(name, limit_s=20.0, **fields):
    return Part(name, "broken_parts", "what it looks at", limit_s, ROWS, **fields)


def test_a_part_that_works_hands_back_its_rows(runner):
    outcome = runner.run(part("works"))
    assert outcome.status == "done"
    assert outcome.values == {"first": 1.5, "second": True}
    assert outcome.details == {"first": {"made_of": [1, 2]}, "second": {}}
    assert outcome.facts == {"seen": "works"}


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises", "failed", "ArithmeticError: as it is meant to"),
        ("dies", "failed", "died by signal 11 (SIGSEGV)"),
        ("is_not_for_here", "not run", "there is no such thing"),
    ],
)
def test_a_part_that_ends_early_is_told_with_what_it_had(runner, name, status, reason):
    outcome = runner.run(part(name))
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.values == {"first": 1.5}
    assert ("as it is meant to" in outcome.output.get("0", "")) == (name == "raises")


def test_a_part_that_hangs_is_ended_at_its_limit_and_told_where_it_was(runner):
    outcome = runner.run(part("hangs", limit_s=3.0))
    assert (outcome.status, outcome.reason) == ("timed out", "not done after 3 s")
    assert outcome.values == {"first": 1.5}
    assert "in hangs" in outcome.output["0"]


def test_what_a_part_started_ends_with_it(runner):
    assert runner.run(part("leaves_a_child_that_hangs")).status == "done"
    group = int((runner.folder / "left").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process group {group} is still there")


def test_a_rank_that_fails_ends_its_peers_and_is_named(runner):
    outcome = runner.run(part("one_rank_raises", ranks=3))
    assert (outcome.status, outcome.reason) == ("failed", "rank 1: ArithmeticError: as it is meant to")
    assert set(outcome.output) == {"0", "1", "2"}


def test_a_rank_that_is_to_be_killed_may_be(runner):
    assert runner.run(part("one_rank_is_killed", ranks=2, killed=(1,))).status == "done"
    outcome = runner.run(part("nobody_is_killed", ranks=2, killed=(1,)))
    assert (outcome.status, outcome.reason) == ("failed", "rank 1: was to be killed, and ended with status 0")


def test_a_part_for_which_no_time_is_left_is_not_run(tmp_path):
    runner = Runner(tmp_path, time.monotonic() + 5, False, {}, lambda rank: {})
    outcome = runner.run(part("works"))
    assert (outcome.status, outcome.reason) == ("not run", "out of time")


# ---- results


def test_rows_are_met_or_short_by_their_bars():
    assert ROWS[0].met(2.0) is True
    assert ROWS[0].met(2.1) is False
    assert ROWS[0].bar == "<= 2 us"
    assert Row("x", "x", "%", at_least=85).met(84.9) is False
    assert Row("x", "x", "%").met(1) is None
    assert ROWS[1].met(True) is True
    assert ROWS[1].met(False) is False


def results(tmp_path, *outcomes, dry_run=False):
    made = Results({"bench": "gpu_check"}, tmp_path / "out.json", dry_run)
    for outcome in outcomes:
        made.add(part("works"), outcome)
    return made


def test_the_file_is_whole_after_each_part(tmp_path):
    good = Outcome("done", values={"first": 1.5, "second": True})
    made = results(tmp_path, good)
    assert made.succeeded()
    assert [row["met"] for row in json.loads((tmp_path / "out.json").read_text())["parts"][0]["rows"]] == [True, True]
    made.add(part("works"), Outcome("failed", "a reason\nof several lines"))
    found = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert [entry["status"] for entry in found] == ["done", "failed"]
    assert found[1]["reason"] == "a reason\nof several lines"
    assert not made.succeeded()


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("done", values={"first": 2.5, "second": True}),
        Outcome("done", values={"first": 1.5, "second": False}),
        Outcome("done", values={"first": 1.5}),
        Outcome("timed out"),
    ],
)
def test_a_bar_that_is_missed_or_a_row_that_is_missing_is_no_success(tmp_path, outcome):
    assert not results(tmp_path, outcome).succeeded()


def test_what_cannot_be_here_is_no_failure(tmp_path, capsys):
    made = results(tmp_path, Outcome("not run", "there is no such thing"))
    assert made.succeeded()
    assert "not run: there is no such thing" in capsys.readouterr().out


def test_numbers_of_a_dry_run_are_in_no_table(tmp_path, capsys):
    results(tmp_path, Outcome("done", values={"first": 1.5, "second": True}), dry_run=True)
    printed = capsys.readouterr().out
    assert "dry run" in printed
    assert "1.5" not in printed
    (entry,) = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert [(row["value"], row["met"]) for row in entry["rows"]] == [(None, None)] * 2


# ---- the parts' own


def test_ranks_that_share_a_gpu_are_allowed_to_by_the_nccl_that_is_there():
    old, new = environment.of_sharing_rank(1, 22809), environment.of_sharing_rank(1, 23003)
    assert old["NCCL_HOSTID"] == "rank1"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in old
    assert new["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new


def test_another_nccl_is_loaded_before_torchs():
    assert environment.of_all("/x/libnccl.so.2")["LD_PRELOAD"] == "/x/libnccl.so.2"
    assert "LD_PRELOAD" not in environment.of_all(None)


def test_findings_of_the_sanitizer_are_read_from_its_summary():
    summary = sanitizer._TOOLS["memcheck"][1]
    assert sanitizer.findings("memcheck", summary, "x\n========= ERROR SUMMARY: 0 errors\n", 0) == 0
    assert sanitizer.findings("memcheck", summary, "========= ERROR SUMMARY: 3 errors", 1) == 3
    with pytest.raises(RuntimeError, match="status 1"):
        sanitizer.findings("memcheck", summary, "========= ERROR SUMMARY: 0 errors", 1)
    text = "========= Error: Device not supported. Please refer\n========= ERROR SUMMARY: 1 error"
    with pytest.raises(NotRun, match="memcheck does not work here: Error: Device not supported"):
        sanitizer.findings("memcheck", summary, text, 1)
    with pytest.raises(NotRun, match="nothing"):
        sanitizer.findings("memcheck", summary, "", 255)


def test_arms_take_turns_in_alternating_order():
    order = []

    def arm(name):
        return lambda: order.append(name) or float(len(order))

    samples = interleaved({name: arm(name) for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert samples == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert paired(samples["a"], samples["b"], lambda a, b: a - b)["median"] == 0.0
    assert spread([1.0])["p90"] == 1.0
