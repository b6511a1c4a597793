"""Each benchmark runs end to end in its smoke mode: records parse, every arm is there, nothing is wrong."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"
TIMEOUT_S = 240


def run(script, *options):
    command = [sys.executable, str(BENCH / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def records(tmp_path, script, *options):
    out = tmp_path / "out.jsonl"
    done = run(script, "--quick", "--out", str(out), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for record in found:
        assert record["wrong"] == 0, record
        assert record["quick"] is True
        assert record["machine"]["cores"] >= 1
        assert record["versions"]["torch"]
    return found


def arms_of(found, **fields):
    return {record["arm"] for record in found if all(record[key] == value for key, value in fields.items())}


def test_transport_bench_checks_every_operation_in_every_arm(tmp_path):
    arms = {"ours", "ours_plain", "gloo"}
    found = records(tmp_path, "bench_transport.py", "--ranks", "2", "--sizes", "4,1M", "--arms", ",".join(sorted(arms)))
    for op in ("reduce_scatter", "all_gather", "broadcast", "barrier"):
        assert arms_of(found, op=op) == arms
    assert arms_of(found, op="all_reduce", bytes=4) == arms
    assert arms_of(found, op="all_reduce", bytes=1 << 20) == arms | {"memory"}
    limited = [record for record in found if record["limit_share"] is not None]
    for record in limited:
        # algbw / limit = (S / t) / (S / t_pass)
        assert math.isclose(record["limit_share"] * record["limit_algbw_gb_s"], record["algbw_gb_s"])


def test_ddp_bench_checks_gradients_of_all_eight_models(tmp_path):
    found = records(tmp_path, "bench_ddp.py")
    assert len({record["model"] for record in found}) == 8
    for model in {record["model"] for record in found}:
        assert arms_of(found, model=model) == {"none", "stock", "stock_views", "ours"}


def test_engine_bench_times_gradients_and_buckets(tmp_path):
    found = records(tmp_path, "bench_engine.py")
    assert arms_of(found, what="gradient") == {"bare", "hook", "stock", "stock_views", "ours"}
    assert arms_of(found, what="bucket") == {"stock", "stock_views", "ours"}
    assert arms_of(found, what="trace event") == {"ours"}


def test_audit_bench_checks_that_audits_find_what_differs_and_read_everything(tmp_path):
    found = records(tmp_path, "bench_audit.py", "--models", "gpt10m,convnet", "--every", "50")
    for model in ("gpt10m", "convnet"):
        assert arms_of(found, model=model) == {"step", "audit"}
    for record in found:
        if record["arm"] == "audit":
            assert math.isclose(record["share_percent"], 100 * record["ratio_to_step"]["median"] / 50)


@pytest.fixture
def bench(monkeypatch):
    """Imports a file of the bench folder, as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.mark.parametrize("script", ["bench_transport", "bench_ddp", "bench_engine", "bench_audit"])
@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--arms", "glo", "arm 'glo'"),
        ("--ranks", "0", "ranks '0'"),
        ("--rank", "2", "--rank 2"),
        ("--sise", "4", "--sise 4"),
    ],
)
def test_an_option_that_cannot_be_served_is_an_error_naming_it(bench, capsys, script, option, value, named):
    with pytest.raises(SystemExit) as ended:
        bench(script).options().parse_args([option, value])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_record_file_that_cannot_be_written_is_an_error_before_any_rank_starts(bench, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", "--out", "/nonexistent/x"])
    with pytest.raises(SystemExit) as ended:
        bench("harness").main("bench_engine.py", bench("bench_engine").options(), pytest.fail)
    assert ended.value.code == 2
    assert "/nonexistent/x" in capsys.readouterr().err


def test_a_wrong_result_is_counted(bench):
    # The check that the other tests rely on must be able to fail: an all-reduce that does nothing is wrong everywhere.
    patterns = bench("patterns")
    array = torch.empty(1000)
    patterns.fill(array, patterns.row(0))
    assert patterns.count_wrong(array, patterns.row(0)) == 0
    assert patterns.count_wrong(array, patterns.summed_row(2)) == 1000
    assert patterns.count_wrong(array.roll(1), patterns.row(0)) > 900
    array[7] = float("nan")
    assert patterns.count_wrong(array, patterns.row(0)) == 1


def test_in_place_sums_stay_exact_for_as_long_as_the_bench_loops(bench):
    patterns = bench("patterns")
    for size in (2, 3, 4, 8):
        sums = patterns.max_sums(size)
        last, before = patterns.summed_row(size, sums=sums), patterns.summed_row(size, sums=sums - 1)
        assert torch.equal(last.double(), before.double() * size)
        assert torch.isfinite(last).all()
        if patterns.is_power_of_two(size):
            patterns.take_back(last, size, sums - 1)
            assert torch.equal(last, patterns.summed_row(size))
