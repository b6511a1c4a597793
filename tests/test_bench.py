"""Each benchmark runs end to end in its smoke mode: records parse, every arm is there, nothing is wrong."""

import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
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
    assert arms_of(found, what="hook call") == {"hook", "ours"}
    assert arms_of(found, what="bucket") == {"stock", "stock_views", "ours"}
    assert arms_of(found, what="trace event") == {"ours"}


def test_audit_bench_checks_that_audits_find_what_differs_and_read_everything(tmp_path):
    found = records(tmp_path, "bench_audit.py", "--models", "gpt10m,convnet", "--every", "50")
    for model in ("gpt10m", "convnet"):
        assert arms_of(found, model=model) == {"step", "audit"}
    for record in found:
        if record["arm"] == "audit":
            assert math.isclose(record["share_percent"], 100 * record["ratio_to_step"]["median"] / 50)


def test_unused_bench_times_every_arm_with_and_without(tmp_path):
    found = records(tmp_path, "bench_unused.py")
    assert arms_of(found) == {"stock", "stock_views", "ours"}
    for record in found:
        assert record["modules"] == 10
        assert record["ms"]["median"] > 0
        assert record["with_find_ms"]["median"] > 0


@pytest.fixture
def bench(monkeypatch):
    """Imports a file of the bench folder, as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


SCRIPTS = ["bench_transport", "bench_ddp", "bench_engine", "bench_audit", "bench_unused", "bench_network"]


@pytest.mark.parametrize("script", SCRIPTS)
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


@pytest.fixture
def wire(bench):
    """bench/wire.py, where two namespaces can be joined here."""
    found = bench("wire")
    try:
        with found.two_hosts(2):
            pass
    except bench("launch").LaunchError as error:
        pytest.skip(f"no wire can be made here: {error}")
    return found


def test_network_bench_checks_gradients_and_reports_the_bound_of_ours(tmp_path, wire):
    found = records(tmp_path, "bench_network.py")
    for model in ("gpt10m", "mlp16.8m"):
        assert arms_of(found, model=model) == {"none", "stock", "stock_views", "ours"}
    for record in found:
        assert math.isfinite(record["bandwidth_mb_s"]["median"])  # of a time less a latency: noise can turn its sign
        assert (record["exposed_over_bound"] is not None) == (record["arm"] == "ours")
        if record["arm"] == "ours":
            assert 0 <= record["overlap"]["median"] <= 1


def namespaces(wire, pid):
    return [name for name in wire.existing() if name.startswith(f"gpucomm_bench_{pid}_")]


@contextlib.contextmanager
def network_bench_under_way(wire):
    """Yields a bench_network that has started its ranks, and their process ids."""
    command = [sys.executable, str(BENCH / "bench_network.py"), "--quick", "--seconds", "600", "--models", "mlp16.8m"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(ranks := children(started.pid)) < 2 or len(namespaces(wire, started.pid)) < 2:
            assert time.monotonic() < deadline
            assert started.poll() is None
            time.sleep(0.05)
        yield started, ranks
    finally:
        started.kill()
        started.communicate()


def children(pid):
    """Those processes that are ranks of a benchmark by now."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"bench_network.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_network_bench_leaves_no_namespace(wire, number):
    with network_bench_under_way(wire) as (started, _):
        started.send_signal(number)
        started.communicate(timeout=60)
        assert started.returncode != 0
        assert namespaces(wire, started.pid) == []


def test_a_killed_rank_ends_the_network_bench_and_leaves_no_namespace(wire):
    with network_bench_under_way(wire) as (started, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, stderr = started.communicate(timeout=60)
        assert started.returncode == 1
        assert stderr.splitlines()[-1].startswith("bench_network.py: world size 2: process ")
        assert namespaces(wire, started.pid) == []


def test_what_a_killed_network_bench_left_is_removed_by_the_next_one(wire):
    with network_bench_under_way(wire) as (started, ranks):
        started.kill()
        started.wait()
        assert len(namespaces(wire, started.pid)) == 2
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
    with wire.two_hosts(2):
        assert namespaces(wire, started.pid) == []
        wire.remove_leftovers()  # leaves alone those of a process that lives
        assert len(namespaces(wire, os.getpid())) == 2
    assert namespaces(wire, os.getpid()) == []


def without(command):
    return lambda name: None if name == command else f"/usr/sbin/{name}"


@pytest.mark.parametrize(
    ("where", "what", "value", "named"),
    [
        (os, "geteuid", lambda: 1000, "network namespaces need root, this process is user 1000"),
        (shutil, "which", without("tc"), "no command 'tc': iproute2 is not installed"),
        (shutil, "which", without("ip"), "no command 'ip': iproute2 is not installed"),
    ],
)
def test_where_no_wire_can_be_made_the_network_bench_says_so_in_a_line(
    bench, capsys, monkeypatch, where, what, value, named
):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(where, what, value)
    monkeypatch.setattr(sys, "argv", ["bench_network.py"])
    network = bench("bench_network")
    with pytest.raises(SystemExit) as ended:
        bench("harness").main("bench_network.py", network.options(), pytest.fail, network.two_hosts)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_the_wire_joins_two_ranks_and_refuses_others(bench):
    with pytest.raises(bench("launch").LaunchError, match="joins 2 ranks, not 3"), bench("wire").two_hosts(3):
        pytest.fail("made")


def test_overlap_counts_from_the_last_launch_to_the_end_of_backward_once(bench):
    timeline = bench("timeline")
    mine = timeline.Timeline((100, 200), ((110, 150), (120, 160), (190, 400), (200, 500)))
    peer = timeline.Timeline((100, 180), ((120, 155), (125, 160), (180, 400), (205, 500)))
    assert timeline.overlap_ns([mine, peer], 0) == (160 - 120) + (200 - 190)
    assert timeline.overlap_ns([mine, peer], 1) == 160 - 120
    assert timeline.Timeline.from_tensor(mine.to_tensor()) == mine


def test_a_timeline_is_that_of_the_last_complete_iteration(bench):
    timeline, event = bench("timeline"), importlib.import_module("gpucomm.trace").TraceEvent
    events = [
        event("pack", 0, 1, 2, 8, 4),
        event("reduce", 0, 2, 3, 8, 4),
        event("header", -1, 3, 4, 64, 4),
        event("pack", 1, 11, 12, 8, 5),
        event("pack", 0, 13, 15, 8, 5),
        event("reduce", 0, 16, 20, 16, 5),
        event("header", -1, 20, 21, 64, 5),
    ]
    assert timeline.Timeline.latest(events) == timeline.Timeline((11, 15), ((16, 20),))
    assert timeline.bucket_nbytes(events) == [16]


@pytest.mark.parametrize(
    ("first_ns", "last_ns", "expected_us"),
    [
        (1_000_000, 2_000_000, 1_000 + 4_000),  # 4 MB at 1 GB/s from the first gradient on
        (1_000_000, 9_000_000, 9_000 + 50 + 1_000),  # the last bucket's 1 MB after the last gradient
    ],
)
def test_the_least_time_of_a_step_is_the_later_of_two_bounds(bench, first_ns, last_ns, expected_us):
    network, timeline = bench("bench_network"), bench("timeline")
    start = 5_000_000_000

    def series(us):
        return bench("harness").Series(torch.tensor([us]), 0, 1, torch.tensor([start]))

    ranks = [
        timeline.Timeline((start + first_ns, start + last_ns - 500_000), ()),
        timeline.Timeline((start + first_ns - 500_000, start + last_ns), ()),
    ]
    wire = {"latency": series(50.0), "bandwidth": series(4050.0)}
    found = network.Measured({"ours": series(0.0), **wire}, [ranks], [1_000_000, 2_000_000, 1_000_000])
    assert network.least_us(found).item() == pytest.approx(expected_us)


def test_optim_bench_checks_the_steps_of_every_arm(tmp_path):
    found = records(tmp_path, "bench_optim.py")
    assert arms_of(found, what="flat") == {"memory", "fused", "foreach", "ours"}
    for what in ("1000 x 1000", "mlp16.8m"):
        assert arms_of(found, what=what) == {"fused", "foreach", "ours"}
