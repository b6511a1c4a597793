"""A pipeline's stage whose submodule is wrapped: data parallel over one dimension of a mesh, stages over the other."""

import inspect

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from toys import batch

from gpucomm import DistributedDataParallel as Ours

MICROBATCHES = 4


def stages():
    torch.manual_seed(6)
    return [
        nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
    ]


def loss_of(output, target):
    return (output - target).square().mean()


def inputs(row, iteration):
    return batch(row, iteration, 8, 6), batch(row, 100 + iteration, 8, 2)


def reference(iterations, rows):
    """Losses and parameters of one process over the batches of all rows."""
    first, second = stages()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.2)
    losses = []
    for iteration in range(iterations):
        optimizer.zero_grad()
        loss = 0
        for row in range(rows):
            x, y = inputs(row, iteration)
            loss = loss + loss_of(second(first(x)), y) / rows
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [[p.detach() for p in stage.parameters()] for stage in (first, second)]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("schedule_of", [ScheduleGPipe, Schedule1F1B])
def test_losses_and_parameters_are_those_of_one_process(schedule_of, transport):
    iterations = 4
    expected, parameters = reference(iterations, rows=2)

    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        row, number = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        ours = Ours(stages()[number], device_mesh=mesh["dp"], transport=transport)
        stage = PipelineStage(ours, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = schedule_of(stage, MICROBATCHES, loss_fn=loss_of)
        # Where schedules do not divide gradients by the number of micro-batches (torch 2.6), the rate does.
        scaled = "scale_grads" in inspect.signature(schedule_of).parameters
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.2 if scaled else 0.2 / MICROBATCHES)
        losses = []
        for iteration in range(iterations):
            optimizer.zero_grad()
            x, y = inputs(row, iteration)
            if number == 0:
                schedule.step(x)
            else:
                parts = []
                schedule.step(target=y, losses=parts)
                mean = torch.stack([part.detach() for part in parts]).mean()
                dist.all_reduce(mean, group=mesh["dp"].get_group())
                losses.append(mean.item() / 2)
            optimizer.step()
        for param, expected_param in zip(ours.parameters(), parameters[number], strict=True):
            torch.testing.assert_close(param.detach(), expected_param, rtol=1e-5, atol=1e-6)
        reductions = ours._reduction.engine.iteration
        return losses, reductions

    for rank, (losses, reductions) in enumerate(run_ranks(body, 4)):
        assert reductions == iterations  # one for all microbatches
        if rank % 2 == 1:
            assert losses == pytest.approx(expected, rel=1e-5)


def test_a_schedule_that_splits_backward_is_refused_before_the_optimizer_steps():
    """Its weights' gradients come past autograd's hooks: they would stay local."""

    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        row, number = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        torch.manual_seed(7)
        parts = [Ours(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), device_mesh=mesh["dp"]) for _ in range(2)]
        group = mesh["pp"].get_group()
        own = [PipelineStage(part, number + 2 * i, 4, torch.device("cpu"), group=group) for i, part in enumerate(parts)]
        schedule = ScheduleInterleavedZeroBubble(own, MICROBATCHES, loss_fn=loss_of)
        x, y = batch(row, 0, 8, 6), batch(row, 100, 8, 6)
        if number == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        refused = []
        for part in parts:
            try:
                torch.optim.SGD(part.parameters(), lr=0.1).step()
            except RuntimeError as error:
                assert "no backward was reduced since: parameter '0." in str(error)  # noqa: PT017
                refused.append(True)
            else:
                refused.append(False)
        grads = [part.module[0].weight.grad for part in parts]
        return refused, grads

    (first, second, third, fourth) = run_ranks(body, 4)
    for (refused, grads), (_, peers) in ((first, third), (second, fourth)):
        for was_refused, grad, peer in zip(refused, grads, peers, strict=True):
            assert was_refused == (not torch.equal(grad, peer))
    assert any(first[0] + second[0])
