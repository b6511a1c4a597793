"""DistributedDataParallel with parameters on a GPU, over the stand-ins for the CUDA driver and NCCL."""

import pytest
import torch
from fake_cuda.ranks import on_gpu
from gradients import mean_gradients
from ranks import run_ranks
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours

SEEDS = range(3)


def gradients(ddp):
    return {name: param.grad for name, param in ddp.module.named_parameters()}


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_the_mean_over_the_ranks(fake_cuda, seed):
    def body(rank, world):
        model = mlp()
        expected = [
            mean_gradients(model, lambda m, r, i=i: m(batch(r, i, 5, 24)).square().mean(), world) for i in range(3)
        ]
        with on_gpu(rank, world, seed=seed):
            ours = Ours(model)
            assert ours.transport == "nccl"
            for iteration in range(3):
                ours.zero_grad()
                ours(batch(rank, iteration, 5, 24)).square().mean().backward()
                for name, grad in gradients(ours).items():
                    torch.testing.assert_close(grad, expected[iteration][name])

    run_ranks(body, 2)
