"""The language-model example: presets, text, batches, the program on two ranks, and one line for each bad input."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from gpucomm.examples.train_lm import compare, memory, options, train
from gpucomm.examples.train_lm.__main__ import main
from gpucomm.examples.train_lm.model import GPT, PRESETS, Shape, generate, loss
from gpucomm.examples.train_lm.text import TrainBatches, held_out_batches, read_text
from gpucomm.trainer.checkpoint import load_file

ROOT = Path(__file__).parent.parent
PROGRAM = [sys.executable, "-m", "gpucomm.examples.train_lm"]
SMALL = ["--preset", "tiny", "--batch-size", "2", "--block-size", "16", "--sample-length", "40"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("".join(f"line {number}: all work and no play\n" for number in range(500)))
    return str(path)


def run_as_ranks(*arguments):
    """The program as two ranks that a launcher has started: their outcomes."""
    return run_ranks(lambda rank, world: main(list(arguments)), 2, init=False, expect_failures=True)


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory):
    """Six steps on two ranks with checkpoints at 3 and 6: (folder, the finished process)."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["--data", corpus, "--out", str(folder), "--steps", "6", "--eval-every", "3", "--checkpoint-every", "3"]
    process = subprocess.run([*PROGRAM, *SMALL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return folder, process


# The model


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 1), ("small", 3), ("medium", 10), ("gpt2", 124)])
def test_presets_have_their_number_of_parameters(preset, millions):
    assert memory.parameter_count(PRESETS[preset]) == pytest.approx(millions * 1e6, rel=0.1)


def test_a_prediction_depends_on_earlier_bytes_only():
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, heads=2, width=16, block_size=8))
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(2)[0]
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()


def test_an_untrained_model_is_as_good_as_guessing():
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 9))
    value = loss(GPT(Shape(layers=2, heads=2, width=64, block_size=8)), (tokens[:, :-1], tokens[:, 1:]))
    assert value.item() == pytest.approx(5.545, abs=0.1)  # log 256


def test_the_same_seed_generates_the_same_bytes_beyond_the_block_size():
    torch.manual_seed(0)
    model = GPT(Shape(layers=1, heads=1, width=8, block_size=4, vocabulary=300))
    first = generate(model, b"ab", 20, seed=1)
    assert len(first) == 20
    assert first == generate(model, b"ab", 20, seed=1)
    assert first != generate(model, b"ab", 20, seed=2)


@pytest.mark.parametrize("shape", [PRESETS["tiny"], Shape(layers=3, heads=2, width=10, block_size=7, vocabulary=300)])
def test_the_counted_parameters_are_the_model_s(shape):
    assert memory.parameter_count(shape) == sum(parameter.numel() for parameter in GPT(shape).parameters())


# Text and batches


def test_the_default_text_is_several_megabytes_in_the_same_order_every_time():
    text = read_text(None, 128)
    assert text.byte_count > 4e6
    assert text.digest == read_text(None, 128).digest
    assert b"def " in bytes(text.train[:100_000])


def test_a_folder_is_read_in_the_order_of_names_without_what_is_not_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("second " * 10)
    (tmp_path / "a.txt").write_text("first " * 10)
    (tmp_path / "c.bin").write_bytes(bytes(range(256)))
    (tmp_path / ".hidden").write_text("hidden")
    text = read_text(str(tmp_path), 8)
    assert bytes(torch.cat([text.train, text.held_out])) == b"first " * 10 + b"\n" + b"second " * 10


def test_held_out_text_is_never_trained_on(corpus):
    text = read_text(corpus, 16)
    content = Path(corpus).read_bytes()
    assert bytes(text.train) + bytes(text.held_out) == content
    assert len(text.held_out) == len(content) // 20


def test_batches_differ_between_ranks_positions_and_seeds_and_can_be_drawn_again(corpus):
    text = read_text(corpus, 16)

    def batch(seed, rank, position):
        return TrainBatches(text, 4, 16, seed, rank)(position)

    inputs, targets = batch(0, 0, 5)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, batch(0, 0, 5)[0])
    for other in [(0, 1, 5), (0, 0, 6), (1, 0, 5), (0, 5, 0)]:
        assert not torch.equal(inputs, batch(*other)[0])


def test_held_out_batches_differ_between_ranks_and_are_equally_many(corpus):
    text = read_text(corpus, 16)
    per_rank = [held_out_batches(text, 4, 16, rank, 3) for rank in range(3)]
    assert len({len(batches) for batches in per_rank}) == 1
    firsts = [batches[0][0] for batches in per_rank]
    assert not torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[1], firsts[2])


# The program


def test_the_program_trains_and_ends_with_a_sample_of_text(finished_run):
    folder, process = finished_run
    assert process.stderr == ""
    assert process.stdout.count("held-out loss") == 2
    sample = process.stdout.partition("--- sample of 40 bytes\n")[2].removesuffix("\n---\n")
    assert 10 <= len(sample) <= 40
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert all(record["bytes_per_s"] > 0 for record in records if "loss" in record)


def test_a_sample_cannot_steer_the_terminal():
    assert train.printable(b"a\n\tb\x1b[2J\xff\r\x00\xc3\xa9") == "a\n\tb\ufffd[2J\ufffd\ufffd\ufffd\u00e9"


def test_a_resumed_program_ends_with_bitwise_the_same_weights_and_losses(finished_run, tmp_path):
    whole, _ = finished_run
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    first, second = run_as_ranks("--resume", str(folder))
    assert first.value == second.value == 0, (first.complaint(), second.complaint(), first.output)
    assert f"resumed {folder} at step 3" in first.output
    assert second.output == ""

    first, second = (load_file(path / "checkpoints/step-00000006/shared.pt") for path in (whole, folder))
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    assert str(first["optimizer"]) == str(second["optimizer"])
    lines = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (whole, folder)
    ]
    keys = ("step", "loss", "eval_loss", "lr", "grad_norm")
    assert [[record.get(key) for key in keys] for record in lines[0]] == [
        [record.get(key) for key in keys] for record in lines[1]
    ]


def test_a_comparison_finds_equal_losses(corpus, tmp_path):
    folder = tmp_path / "run"
    first, second = run_as_ranks(*SMALL, "--data", corpus, "--out", str(folder), "--steps", "8", "--compare")
    assert first.value == second.value == 0, (first.complaint(), second.complaint(), first.output)
    assert "losses of all 8 steps bitwise equal: yes" in first.output
    assert "final weights bitwise equal: yes" in first.output
    assert second.output == ""
    result = json.loads((folder / "compare.json").read_text())
    assert f"gradient_as_bucket_view={result['stock_gradient_as_bucket_view']}" in first.output
    assert all(seconds > 0 for seconds in result["median_step_s"].values())
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8


def test_a_comparison_says_so_when_one_rank_s_losses_or_weights_differ(tmp_path):
    def body(rank, world):
        stock, ours = (
            compare.Arm(name, torch.nn.Linear(1, 1), None, seconds=[1.0] * 9, losses=[2.5] * 9) for name in "ab"
        )
        ours.model.load_state_dict(stock.model.state_dict())
        if rank == 1:
            ours.losses[3] += 1e-15
            with torch.no_grad():
                ours.model.bias += 1
        ours.seconds = [0.5 + rank] * 9
        compare.report(stock, ours, options.Settings(out=str(tmp_path)), stock_views=False)

    first, second = run_ranks(body, 2, expect_failures=True)
    assert first.complaint() is second.complaint() is None
    assert "losses of all 9 steps bitwise equal: NO" in first.output
    assert "final weights bitwise equal: NO" in first.output
    assert json.loads((tmp_path / "compare.json").read_text())["paired_ratio"] == 1.5  # the slower rank counts


def test_ctrl_c_ends_all_ranks_within_three_seconds_with_one_line(corpus, tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [*PROGRAM, *SMALL, "--data", corpus, "--out", str(folder), "--steps", "100000", "--checkpoint-every", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = descendants(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, stderr = process.communicate(timeout=10)
        assert time.monotonic() - start < 3
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr == "train_lm: ended by SIGINT\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not list(folder.rglob("*.partial"))


def descendants(pid):
    children = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(child) for file in children for child in file.read_text().split()]
    return [*direct, *(below for child in direct for below in descendants(child))]


# Bad input


def bad_data(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \n\n")
    (tmp_path / "short").write_text("hello")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binaries").mkdir()
    (tmp_path / "binaries" / "one").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--data {tmp}/missing", "--data {tmp}/missing: no such file or folder"),
        ("--data {tmp}/empty", "--data {tmp}/empty: no readable text in it"),
        ("--data {tmp}/blank", "--data {tmp}/blank: no readable text in it"),
        ("--data {tmp}/folder", "--data {tmp}/folder: the folder has no files"),
        ("--data {tmp}/binaries", "--data {tmp}/binaries: no readable text in it"),
        ("--data {tmp}/binary", "--data {tmp}/binary: not text (expected UTF-8)"),
        ("--data {tmp}/short", "--data {tmp}/short: 5 bytes are too few"),
        ("--nproc 0", "--nproc: expected a whole number from 1 to 2^63 - 1, got 0"),
        ("--nproc -1", "--nproc: expected a whole number from 1 to 2^63 - 1, got -1"),
        ("--nproc 100000 --data {corpus}", "--nproc 100000 needs about"),
        ("--batch-size 1000000000 --data {corpus}", "is available, enough for none"),
        ("--steps 0", "--steps: expected a whole number from 1 to 2^63 - 1, got 0"),
        ("--batch-size 1.5", "--batch-size: expected a whole number"),
        ("--block-size 0", "--block-size: expected a whole number"),
        ("--accumulate 0", "--accumulate: expected a whole number"),
        ("--eval-every 0", "--eval-every: expected a whole number"),
        ("--seed 99999999999999999999", "--seed: expected a whole number from 0 to 2^63 - 1"),
        ("--lr 0", "--lr: expected a number above 0, got 0"),
        ("--lr nan", "--lr: expected a number above 0, got nan"),
        ("--clip -1", "--clip: expected a number above 0, got -1"),
        ("--preset huge", "--preset: invalid choice: 'huge'"),
        ("--transport pigeon", "--transport: invalid choice: 'pigeon'"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("--data {corpus} --out {tmp}/short/run", "--out {tmp}/short/run: {tmp}/short is not a folder"),
        ("--data {corpus} --out {tmp}/binaries", "--out {tmp}/binaries: is not empty"),
        ("--resume {tmp}/folder", "--resume {tmp}/folder: no run there"),
    ],
)
def test_bad_input_gets_one_line_and_writes_nothing(arguments, line, corpus, tmp_path, capsys, monkeypatch):
    bad_data(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    files_before = sorted(tmp_path.rglob("*"))
    status = main(arguments.format(tmp=tmp_path, corpus=corpus).split())
    captured = capsys.readouterr()
    assert status == 1
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("train_lm: ")
    assert line.format(tmp=tmp_path) in captured.err
    assert sorted(tmp_path.rglob("*")) == files_before


def flip_a_byte(folder):
    path = folder / "checkpoints/step-00000006/shared.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(folder):
    path = folder / "checkpoints/step-00000006/rank-1.pt"
    path.write_bytes(path.read_bytes()[:-50])


def claim_another_shape(folder):
    settings = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**settings, "preset": "medium"}))


def break_settings(folder):
    (folder / "run.json").write_text('{"preset": ')


def lose_a_rank(folder):
    for path in folder.glob("checkpoints/*/rank-1.pt"):
        path.unlink()


def other_text(folder):
    settings = json.loads((folder / "run.json").read_text())
    other = folder.parent / "other.txt"
    other.write_text("something else\n" * 100)
    (folder / "run.json").write_text(json.dumps({**settings, "data": str(other)}))


@pytest.mark.parametrize(
    ("damage", "arguments", "line"),
    [
        (flip_a_byte, "", "step 3 is intact: delete"),
        (flip_a_byte, "", "shared.pt: damaged, the checksum"),
        (truncate, "", "rank-1.pt: not a readable checkpoint"),
        (claim_another_shape, "", "tokens.weight is torch.float32 (256, 320) in the model"),
        (break_settings, "", "run.json is not readable"),
        (lose_a_rank, "", "it has no complete checkpoint"),
        (other_text, "", "another text than"),
        (None, "", "the run is at step 6 already"),
        (None, "--preset small", "the run has --preset tiny, not small"),
        (None, "--block-size 32", "the run has --block-size 16, not 32"),
        (None, "--nproc 3", "the run has --nproc 2, not 3"),
        (None, "--compare", "a comparison with stock DDP cannot be continued"),
        (None, "--out elsewhere", "continues in its own folder"),
    ],
)
def test_a_resume_that_does_not_fit_gets_one_line(damage, arguments, line, finished_run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished_run[0], folder)
    steps = []
    if damage is not None:
        damage(folder)
        steps = ["--steps", "9"]
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert main(["--resume", str(folder), *steps, *arguments.split()]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert line in captured.err
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_bad_input_in_ranks_is_told_by_rank_0_only():
    first, second = run_as_ranks("--nproc", "5")
    assert first.output == "train_lm: --nproc 5: the launcher has started 2 ranks\n"
    assert second.output == ""
    assert 0 not in (first.value, second.value)


# Memory


def write_machine(root, available_kib, groups):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(groups)


@pytest.mark.parametrize(("machine_kib", "expected"), [(10, 10 << 10), (1000, 70_000)])
def test_available_memory_heeds_the_limits_of_all_control_groups_above(tmp_path, machine_kib, expected):
    write_machine(tmp_path, machine_kib, "0::/outer/inner\n")
    outer, inner = tmp_path / "sys/fs/cgroup/outer", tmp_path / "sys/fs/cgroup/outer/inner"
    inner.mkdir(parents=True)
    for folder, limit in [(outer, "100000"), (inner, "max")]:
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("50000\n")
        (folder / "memory.stat").write_text("anon 30000\ninactive_file 20000\n")
    assert memory.available_bytes(tmp_path) == expected


def test_available_memory_heeds_version_1_groups_seen_from_inside_a_container(tmp_path):
    write_machine(tmp_path, 1000, "5:cpu:/x\n4:memory,other:/not/mounted/here\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("90000\n")
    (folder / "memory.usage_in_bytes").write_text("50000\n")
    (folder / "memory.stat").write_text("total_inactive_file 1000\n")
    assert memory.available_bytes(tmp_path) == 41_000


def test_the_estimate_grows_with_the_preset_the_batch_and_the_comparison():
    def estimate(*arguments):
        return memory.bytes_per_rank(options.parse(arguments), 0)

    assert estimate("--preset", "tiny") < estimate("--preset", "small") < estimate("--preset", "gpt2")
    assert estimate("--batch-size", "8") < estimate("--batch-size", "16")
    assert estimate("--compare") - estimate() == 20 * memory.parameter_count(PRESETS["small"])
