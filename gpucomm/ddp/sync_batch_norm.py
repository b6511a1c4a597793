"""SyncBatchNorm for modules on the CPU, where torch's refuses its input: batch norm over the batches of all ranks.

    forward    every rank's count, mean and sum of squared deviations go round; all combine them in rank order
    backward   with x' the normalised input: dx = weight / std * (dy - mean(dy) - x' mean(dy x')), means over all ranks;
               the gradients of weight and bias stay local sums, as every gradient that data parallel averages

Statistics are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979): nothing cancels, and all ranks get the same bits.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gpucomm.communicator import Communicator

# One for each process group: its collectives must not get between those of a wrapper's reduction.
_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]" = weakref.WeakKeyDictionary()


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm with a forward for tensors in host memory; collective over its process group in training.

    Raises StepFailed, PeerFailed, CommTimeout: from forward and backward, as other collectives.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.device.type != "cpu":
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        uses_batch = self.training or self.running_mean is None
        group = self.process_group or dist.group.WORLD if self.training and dist.is_initialized() else None
        if group is None or dist.get_world_size(group) == 1:
            return torch.nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                uses_batch,
                self._count_batch(),
                self.eps,
            )
        comm = _communicator(group)
        count, mean, var = _statistics(input, comm)
        self._follow(self._count_batch(), count, mean, var)
        output: torch.Tensor = _Normalise.apply(input, self.weight, self.bias, mean, var, count, self.eps, comm)
        return output

    def _count_batch(self) -> float:
        """The share of this batch in the running statistics."""
        if not self.training or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _follow(self, share: float, count: float, mean: torch.Tensor, var: torch.Tensor) -> None:
        unbiased = var * (count / max(count - 1, 1))
        with torch.no_grad():
            for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
                if running is not None:
                    running.lerp_(now.to(running.dtype), share)


class _Normalise(torch.autograd.Function):
    """Batch norm with given statistics, in whose gradient they are functions of the input of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        count: float,
        eps: float,
        comm: Communicator,
    ) -> torch.Tensor:
        rstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.count, ctx.comm = count, comm
        y = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
        if weight is not None:
            y = y * _per_channel(weight, x)
        if bias is not None:
            y = y + _per_channel(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = grads[0].to(mean.dtype)
        normalised = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
        dims = _all_but_channels(x)
        sums = torch.stack([dy.sum(dims), (dy * normalised).sum(dims)])
        d_bias, d_weight = sums.clone()
        ctx.comm.all_reduce(sums)
        mean_dy, mean_dy_x = sums / ctx.count
        dx = dy - _per_channel(mean_dy, x) - normalised * _per_channel(mean_dy_x, x)
        scale = rstd if weight is None else rstd * weight
        dx = (dx * _per_channel(scale, x)).to(x.dtype)
        has_weight, has_bias = ctx.needs_input_grad[1:3]
        weight_grad = d_weight.to(weight.dtype) if has_weight else None
        bias_grad = d_bias.to(x.dtype if weight is None else weight.dtype) if has_bias else None
        return dx, weight_grad, bias_grad, None, None, None, None, None


def serve(module: torch.nn.Module) -> None:
    """Makes the SyncBatchNorm layers of a module work on the CPU, in place.

    Raises ValueError for one whose class has a forward of its own, which would refuse such input.
    """
    for layer in module.modules():
        if not isinstance(layer, torch.nn.SyncBatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        if layer.weight is not None and layer.weight.device.type != "cpu":
            continue
        if type(layer) is not torch.nn.SyncBatchNorm:
            raise ValueError(
                f"SyncBatchNorm layers only work with GPU modules, or on the CPU as torch.nn.SyncBatchNorm itself, not "
                f"as its subclass {type(layer).__name__}"
            )
        layer.__class__ = SyncBatchNorm


def _communicator(group: dist.ProcessGroup) -> Communicator:
    """The group's, made at the first use: every rank comes here with the same forward."""
    comm = _communicators.get(group)
    if comm is None:
        comm = Communicator(group)
        if comm.transport == "c10d":
            # On the group itself these would get between the operations of a reduction, at another place on each rank.
            ranks = dist.get_process_group_ranks(group)
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            comm = Communicator(own, "c10d")
        _communicators[group] = comm
    return comm


def _statistics(x: torch.Tensor, comm: Communicator) -> tuple[float, torch.Tensor, torch.Tensor]:
    """(elements per channel, mean, biased variance) over all ranks, in at least float32; collective."""
    with torch.no_grad():
        dims, channels = _all_but_channels(x), x.shape[1]
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        count = x.numel() // channels
        mine = values.new_zeros(3, channels)
        mine[0] = count
        if count:
            mine[1] = values.mean(dims)
            mine[2] = (values - _per_channel(mine[1], x)).square_().sum(dims)
        everything = mine.new_empty(comm.world_size, 3, channels)
        comm.all_gather(everything, mine)
        counts, means, squares = everything.unbind(1)
        total = float(counts[:, 0].sum())
        if total == 0:
            raise ValueError("Expected more than 0 values per channel when training, got none on any rank")
        mean = (counts * means).sum(0) / total
        var = (squares + counts * (means - mean).square()).sum(0) / total
        return total, mean, var


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))
