"""Trainer: its steps equal the plain torch loop, its files can be read, and a resumed run is the run it continues."""

import contextlib
import copy
import io
import json
import math
import os
import random
import re
import shutil
import sys

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gpucomm
from gpucomm.trainer import CheckpointError, Trainer, progress
from gpucomm.trainer.checkpoint import CheckpointFolder, load_file


def make_model(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def squared_error(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def batch_at(position, count=4):
    generator = torch.Generator().manual_seed(position)
    inputs = torch.randn(count, 3, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def make_trainer(model=None, batches=batch_at, lr=0.1, **options):
    model = make_model() if model is None else model
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), squared_error, batches, **options)


def weights(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def all_equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def read_records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_steps_equal_the_plain_loop_bitwise():
    model, plain = make_model(), make_model()
    make_trainer(model, clip_norm=0.5).fit(5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for position in range(5):
        optimizer.zero_grad()
        squared_error(plain, batch_at(position)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norm > 0.5 or position > 0  # the first gradient is large enough to be clipped
        optimizer.step()
    assert all_equal(weights(model), weights(plain))


def test_clipping_changes_the_result_and_reports_the_norm_before_it(tmp_path):
    clipped, free = make_model(), make_model()
    make_trainer(clipped, clip_norm=0.1, folder=tmp_path).fit(1)
    make_trainer(free).fit(1)
    assert not all_equal(weights(clipped), weights(free))
    expected = nn.utils.get_total_norm(
        torch.autograd.grad(squared_error(model := make_model(), batch_at(0)), list(model.parameters()))
    )
    assert read_records(tmp_path)[0]["grad_norm"] == expected.item()


def test_accumulation_equals_one_large_batch():
    model = nn.Linear(3, 1)
    large = copy.deepcopy(model)
    make_trainer(model, accumulate=4).fit(3)

    def large_batch_at(position):
        parts = [batch_at(4 * position + micro) for micro in range(4)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    make_trainer(large, large_batch_at).fit(3)
    torch.testing.assert_close(weights(model), weights(large))


def test_only_the_last_micro_batch_is_synchronised():
    class Recording(nn.Linear):
        syncs = True
        seen: list[bool] = []

        @contextlib.contextmanager
        def no_sync(self):
            self.syncs = False
            yield
            self.syncs = True

        def forward(self, x):
            self.seen.append(self.syncs)
            return super().forward(x)

    make_trainer(Recording(3, 1), accumulate=3).fit(2)
    assert Recording.seen == [False, False, True] * 2


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, gpucomm.DistributedDataParallel], ids=["stock", "ours"])
def test_accumulation_over_ranks_equals_one_process_with_all_the_batches(wrapper):
    def body(rank, world):
        model = nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        trainer = make_trainer(wrapper(model), lambda position: batch_at(2 * position + rank), accumulate=2)
        trainer.fit(3)
        return weights(model)

    model = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    make_trainer(model, accumulate=4).fit(3)
    for of_rank in run_ranks(body, 2):
        torch.testing.assert_close(of_rank, weights(model))


def test_a_callable_schedule_scales_the_learning_rate_of_each_step(tmp_path):
    make_trainer(scheduler=lambda step: 1 / (step + 1), folder=tmp_path).fit(4)
    assert [record["lr"] for record in read_records(tmp_path)] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])


def test_a_torch_schedule_steps_once_per_step_not_per_micro_batch(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    Trainer(model, optimizer, squared_error, batch_at, scheduler=schedule, accumulate=3, folder=tmp_path).fit(4)
    assert [record["lr"] for record in read_records(tmp_path)] == pytest.approx([1, 1, 0.1, 0.1])


def test_a_plateau_schedule_follows_the_evaluation_loss():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)  # too little to halve the loss in three steps
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    trainer = Trainer(
        model, optimizer, squared_error, batch_at, scheduler=schedule, eval_batches=[batch_at(99)], eval_every=1
    )
    trainer.fit(3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 / 4)


def test_evaluation_is_the_mean_in_eval_mode_and_leaves_no_trace():
    model = make_model(dropout=0.5)
    batches = [batch_at(100), batch_at(101)]
    trainer = make_trainer(model, eval_batches=batches, average=lambda value: value + 1000)
    before = weights(model)
    loss = trainer.evaluate()
    model.eval()
    expected = sum(squared_error(model, batch).item() for batch in batches) / 2
    assert loss == expected + 1000
    assert all_equal(weights(model), before)  # BatchNorm's running statistics too
    assert all(parameter.grad is None for parameter in model.parameters())
    trainer.train_step()
    assert model.training


def test_metrics_are_json_lines_written_by_rank_0_only(tmp_path):
    def body(rank, world):
        folder = tmp_path / str(rank)
        trainer = make_trainer(
            DistributedDataParallel(make_model()),
            count_items=lambda batch: len(batch[0]),
            eval_batches=[batch_at(50)],
            eval_every=2,
            log_every=2,
            folder=folder,
        )
        trainer.fit(5)
        return (folder / "metrics.jsonl").exists()

    assert run_ranks(body, 2) == [True, False]
    records = read_records(tmp_path / "0")
    assert [record["step"] for record in records] == [2, 2, 4, 4, 5, 5]
    assert all(record["step_s"] > 0 and record["lr"] == 0.1 for record in records[::2])
    assert all(record["samples_per_s"] * record["step_s"] == pytest.approx(8) for record in records[::2])
    assert all(record["eval_loss"] >= 0 for record in records[1::2])


def test_metrics_stay_json_when_the_loss_is_not_a_number(tmp_path):
    make_trainer(batches=lambda position: (torch.full((4, 3), math.nan), torch.zeros(4, 1)), folder=tmp_path).fit(1)
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(float(record["loss"]))


def test_a_failed_step_leaves_no_gradient_behind():
    def fails_once(position):
        if position == 1 and not failed:
            failed.append(True)
            raise OSError("disk")
        return batch_at(position)

    failed: list[bool] = []
    model = make_model()
    trainer = make_trainer(model, fails_once, accumulate=2)
    with pytest.raises(OSError, match="disk"):
        trainer.fit(1)
    assert trainer.step == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("source", ["callable", "loader", "loader with generator"])
def test_a_resumed_run_is_bitwise_the_run_it_continues(tmp_path, source):
    """Dropout, BatchNorm, momentum, schedule, shuffled epochs of 5 batches, and a break in the middle of an epoch."""

    def build(folder):
        torch.manual_seed(7)
        random.seed(7)
        dataset = TensorDataset(*batch_at(0, count=20))
        generator = torch.Generator().manual_seed(3) if source == "loader with generator" else None
        batches = batch_at if source == "callable" else DataLoader(dataset, 4, shuffle=True, generator=generator)
        return make_trainer(
            make_model(dropout=0.3),
            batches,
            scheduler=lambda step: 0.9**step,
            eval_batches=[batch_at(9)],
            eval_every=4,
            checkpoint_every=7,
            accumulate=2,
            folder=folder,
        )

    whole = build(tmp_path / "whole")
    whole.fit(12)
    build(tmp_path / "parts").fit(7)
    torch.manual_seed(1234)  # another process would be somewhere else
    continued = build(tmp_path / "parts")
    torch.rand(5)
    assert continued.resume() == 7
    continued.fit(12)

    assert all_equal(weights(continued.model), weights(whole.model))
    # The first part ended at step 7 and so evaluated there; all else is the same but for the times.
    assert without_times(read_records(tmp_path / "whole")) == [
        record
        for record in without_times(read_records(tmp_path / "parts"))
        if not (record["step"] == 7 and "eval_loss" in record)
    ]


def without_times(records):
    return [{key: value for key, value in record.items() if not key.endswith("_s")} for record in records]


def test_resume_drops_the_metrics_after_the_checkpoint(tmp_path):
    make_trainer(checkpoint_every=2, folder=tmp_path).fit(2)
    trainer = make_trainer(folder=tmp_path)
    trainer.resume()
    trainer.fit(5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    trainer = make_trainer(folder=tmp_path)
    trainer.resume()
    trainer.fit(3)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning")
def test_ranks_resume_their_own_generators_and_buffers(tmp_path):
    def body(rank, world, steps, resume):
        model = make_model(dropout=0.5)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        torch.manual_seed(rank)
        trainer = make_trainer(
            wrapped, lambda position: batch_at(2 * position + rank), folder=tmp_path / "run", checkpoint_every=3
        )
        if resume:
            torch.manual_seed(99)
            trainer.resume()
        trainer.fit(steps)
        return weights(model)

    run_ranks(body, 2, 3, False)
    resumed = run_ranks(body, 2, 6, True)
    (tmp_path / "run").rename(tmp_path / "first")
    whole = run_ranks(body, 2, 6, False)
    assert all_equal(resumed[0], whole[0])
    assert all_equal(resumed[1], whole[1])
    assert not all_equal(whole[0], whole[1])  # the buffers differ between ranks, so each must have its own


def test_checkpoints_count_only_when_every_rank_has_written(tmp_path):
    first, second = CheckpointFolder(tmp_path, 0, 2), CheckpointFolder(tmp_path, 1, 2)
    for step in (1, 2):
        first.save(step, {"step": step}, {"rank": 0})
        if step == 1:
            assert first.latest() is None
            second.save(step, {}, {"rank": 1})
    assert first.latest() == second.latest() == 1
    assert second.load(1) == ({"step": 1}, {"world_size": 2, "rank": 1})
    second.save(2, {}, {"rank": 1})
    first.save(3, {"step": 3}, {"rank": 0})
    assert first.latest() == 2
    assert not (tmp_path / "step-00000001").exists()


def test_a_killed_write_leaves_the_old_file_and_its_remains_go_on_resume(tmp_path):
    make_trainer(checkpoint_every=1, folder=tmp_path).fit(1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    (folder / ".shared.pt.12345.partial").write_bytes(b"half")
    make_trainer(folder=tmp_path).resume()
    assert sorted(os.listdir(folder)) == ["rank-0.pt", "shared.pt"]


def test_any_flipped_byte_of_a_tensor_is_noticed(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.full((1000,), 3.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x00\x00\x40\x40" * 100) + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        load_file(path)


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b"", lambda content: b"x" * 500])
def test_a_truncated_checkpoint_is_refused(tmp_path, damage):
    make_trainer(checkpoint_every=1, folder=tmp_path).fit(1)
    path = tmp_path / "checkpoints" / "step-00000001" / "shared.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"shared\.pt: not a readable checkpoint"):
        make_trainer(folder=tmp_path).resume()


@pytest.mark.parametrize("file", ["shared.pt", "rank-0.pt"])
def test_a_damaged_checkpoint_s_error_leads_to_the_intact_one_before(tmp_path, file):
    make_trainer(checkpoint_every=1, folder=tmp_path).fit(3)
    newest, before = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (3, 2))
    (newest / file).write_bytes((newest / file).read_bytes()[:100])
    with pytest.raises(CheckpointError, match=rf"{file}: .*; step 2 is intact: delete {newest} to resume from there"):
        make_trainer(folder=tmp_path).resume()
    shutil.copytree(newest, tmp_path / "kept")
    shutil.rmtree(newest)
    assert make_trainer(folder=tmp_path).resume() == 2

    shutil.copytree(tmp_path / "kept", newest)
    (before / "rank-0.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="; no older checkpoint is intact"):
        make_trainer(folder=tmp_path).resume()


def test_a_damaged_older_checkpoint_does_not_matter(tmp_path):
    make_trainer(checkpoint_every=1, folder=tmp_path).fit(2)
    (tmp_path / "checkpoints" / "step-00000001" / "rank-0.pt").write_bytes(b"")
    assert make_trainer(folder=tmp_path).resume() == 2


def test_resume_refuses_another_model_and_names_the_difference(tmp_path):
    make_trainer(checkpoint_every=1, folder=tmp_path).fit(1)
    other = make_trainer(nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Identity(), nn.Linear(9, 1)))
    other = make_trainer(other.model, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"0\.weight is torch\.float32 \(9, 3\) in the model, .*\(8, 3\)"):
        other.resume()
    with pytest.raises(CheckpointError, match=r"has 0\.bias, which the model does not know|has no"):
        make_trainer(nn.Linear(3, 1), folder=tmp_path).resume()


def test_resume_refuses_another_world_size_and_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        make_trainer(folder=tmp_path).resume()
    for rank in range(2):
        CheckpointFolder(tmp_path / "checkpoints", rank, 2).save(1, {}, {})
    with pytest.raises(CheckpointError, match="written by 2 ranks, this run has 1"):
        make_trainer(folder=tmp_path).resume()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulate": 0}, ValueError, "accumulate: expected at least 1, got 0"),
        ({"accumulate": 1.5}, TypeError, "accumulate: expected an int, got 1.5"),
        ({"accumulate": True}, TypeError, "accumulate: expected an int, got True"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm: expected a finite number above 0, got -1.0"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm: .* got nan"),
        ({"clip_norm": "1"}, TypeError, "clip_norm: expected a number, got '1'"),
        ({"log_every": -1}, ValueError, "log_every: expected at least 0, got -1"),
        ({"eval_every": 1}, ValueError, "eval_every is 1, but there are no eval_batches"),
        ({"checkpoint_every": 3}, ValueError, "checkpoint_every is 3, but there is no folder"),
        ({"scheduler": 3}, TypeError, "scheduler: expected a callable, got 3"),
        ({"average": 3}, TypeError, "average: expected a callable, got 3"),
        ({"batches": 3}, TypeError, "batches: expected an iterable or a callable .*, got 3"),
        ({"batches": iter([])}, TypeError, "batches: a one-way iterator"),
    ],
)
def test_wrong_arguments_are_named_with_their_value(options, error, message):
    with pytest.raises(error, match=message):
        make_trainer(**options)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        make_trainer(scheduler=torch.optim.lr_scheduler.ConstantLR(other))


def test_an_empty_iterable_is_refused_and_a_sampler_is_told_the_epoch():
    with pytest.raises(ValueError, match="the iterable is empty"):
        make_trainer(batches=[]).fit(1)

    class Sampler(torch.utils.data.SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    dataset = TensorDataset(*batch_at(0, count=8))
    make_trainer(batches=DataLoader(dataset, 4, sampler=Sampler(dataset))).fit(5)
    assert Sampler.epochs == [0, 1, 2]


def test_a_bar_on_a_terminal_on_rank_0_unless_not_wanted(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    make_trainer().fit(3)
    assert "3/3" in shown.getvalue()
    assert "loss=" in shown.getvalue()
    hidden = Terminal()
    monkeypatch.setattr(sys, "stderr", hidden)
    make_trainer(progress=False).fit(3)
    assert hidden.getvalue() == ""


def test_lines_with_the_loss_now_and_then_without_a_terminal(capsys, monkeypatch):
    make_trainer().fit(2)  # faster than the first line would come
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    make_trainer(progress=False).fit(2)
    assert capsys.readouterr().out == ""
    make_trainer(log_every=2).fit(3)
    captured = capsys.readouterr()
    assert captured.err == ""
    first, second, third = captured.out.splitlines()
    assert re.fullmatch(r"step     1 of 3   about \d+ s left", first)
    assert re.fullmatch(r"step     2 of 3   loss \d+\.\d{4}   about \d+ s left", second)
    assert third.startswith("step     3 of 3   loss ")
