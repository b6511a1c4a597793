"""A training step (forward and backward, no optimizer) as a sample of an arm: wrapping, and the check of gradients.

Every arm has its own copy of the model and runs in the same processes. `zero_grad(set_to_none=True)` is outside the
timed part in all arms alike; no optimizer runs, so each arm must produce the same averaged gradients in every step,
and each sample is checked: bitwise on up to two ranks, to rounding on more, where the order of summation is the
arm's own.
"""

import copy

import torch
import torch.distributed as dist
from harness import Sampler, World
from models import Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

ARMS = ("none", "stock", "stock_views", "ours")
_RELATIVE_TOLERANCE = 1e-5


def wrap(arm: str, module: nn.Module, transport: str, **arguments) -> nn.Module:
    """The module as the arm trains it; `arguments` go to either DDP's constructor."""
    if arm == "none":
        return module
    if arm == "ours":
        import gpucomm

        return gpucomm.DistributedDataParallel(module, transport=transport, **arguments)
    return StockDdp(module, gradient_as_bucket_view=arm == "stock_views", **arguments)


def mean_gradients(module: nn.Module, size: int) -> list[torch.Tensor]:
    """The mean over ranks of a plain module's gradients, in parameter order."""
    means = [param.grad.clone() for param in module.parameters()]
    for mean in means:
        dist.all_reduce(mean)
        mean /= size
    return means


def count_wrong(module: nn.Module, expected: list[torch.Tensor], exact: bool) -> int:
    """Elements of the gradients that are not as expected; a missing gradient counts whole."""
    wrong = 0
    for param, mean in zip(module.parameters(), expected, strict=True):
        if param.grad is None:
            wrong += mean.numel()
        elif exact:
            wrong += int((param.grad != mean).sum())
        else:
            scale = mean.abs().max() + mean.abs()
            wrong += int((~((param.grad - mean).abs() <= _RELATIVE_TOLERANCE * scale)).sum())
    return wrong


class Steps:
    """Makes the samplers of one workload's arms. parameters, tensors: how many elements, how many tensors it has."""

    def __init__(self, world: World, workload: Workload):
        self._world = world
        self._workload = workload
        plain = workload.module
        plain(*workload.inputs).backward()
        self._local = [param.grad.clone() for param in plain.parameters()]
        self._means = mean_gradients(plain, world.size)
        plain.zero_grad(set_to_none=True)
        self.parameters, self.tensors = sum(mean.numel() for mean in self._means), len(self._means)

    def copy_of_module(self) -> nn.Module:
        return copy.deepcopy(self._workload.module)

    def sampler(self, name: str, module: nn.Module, reduced: bool) -> Sampler:
        """A sampler of steps of `module`. reduced: gradients are to be the mean over ranks, else this rank's own."""
        inputs = self._workload.inputs
        expected, exact = (self._means, self._world.size <= 2) if reduced else (self._local, True)
        return Sampler(
            name,
            prepare=lambda: module.zero_grad(set_to_none=True),
            run=lambda: module(*inputs).backward(),
            check=lambda _: count_wrong(module, expected, exact),
        )
