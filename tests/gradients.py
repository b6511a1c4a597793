"""What data parallel has to give: expected gradients, and checks against them."""

import copy

import torch
import torch.distributed as dist


def mean_gradients(model, loss_of, world):
    """The gradients that data parallel has to give: loss_of(copy, rank), averaged over the ranks."""
    total = {}
    for rank in range(world):
        replica = copy.deepcopy(model)
        replica.zero_grad()
        loss_of(replica, rank).backward()
        for name, param in replica.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + dense(param.grad) / world
    return total


def dense(grad):
    return grad.to_dense() if grad.is_sparse else grad


def assert_mean(ddp, expected, tolerance=1e-6):
    for name, param in ddp.module.named_parameters():
        if name in expected:
            assert param.grad is not None, name
            torch.testing.assert_close(param.grad, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def same_on_all_ranks(tensors):
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.detach().contiguous())
        assert all(torch.equal(other, gathered[0]) for other in gathered)
