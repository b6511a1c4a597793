"""Buffers: which rank's values the others get, when, and the program's own hooks for them."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location
from toys import ConvNet, batch

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel


class Counts(nn.Module):
    """Adds to a buffer in each forward, and uses what it held."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("number", torch.tensor(0))
        self.rank = rank
        self.at_entry = []

    def forward(self):
        self.at_entry.append(self.seen.clone())
        self.seen.add_(self.rank + 1)
        return self.weight * self.seen.detach().clone()


def summed(state, buffers):
    state.append(sorted(buffers))
    dist.all_reduce(buffers["seen"])


def summed_later(state, buffers):
    state.append(sorted(buffers))
    return [dist.all_reduce(buffers["seen"], async_op=True).get_future()]


def from_the_last_rank(state, buffers):
    state.append(sorted(buffers))
    return [dist.broadcast(t, dist.get_world_size() - 1, async_op=True).get_future() for t in buffers.values()]


@pytest.mark.parametrize("location", list(Location), ids=lambda location: location.name)
@pytest.mark.parametrize("hook", [summed, summed_later, from_the_last_rank], ids=lambda hook: hook.__name__)
def test_a_buffer_hook_does_what_it_does_with_torchs_class(hook, location):
    def body(rank, world):
        if hook is not summed and location is Location.PRE_FORWARD:
            return  # the buffers are still being written to while forward uses them
        arms = []
        for wrapper in (Stock, Ours):
            ddp = wrapper(Counts(rank))
            state = []
            ddp._register_buffer_comm_hook(state, hook, location)
            for _ in range(3):
                ddp().sum().backward()
            arms.append((ddp.module, state))
        (stock, stock_state), (ours, our_state) = arms
        assert our_state == stock_state == [["number", "seen"]] * 3
        assert torch.equal(ours.seen, stock.seen)
        for a, b in zip(ours.at_entry, stock.at_entry, strict=True):
            assert torch.equal(a, b)

    run_ranks(body, 2)


def test_a_buffer_hook_does_not_count_as_a_change_for_autograd():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("scale", torch.full((2,), 2.0))

        def forward(self):
            return self.weight * self.scale  # autograd keeps the buffer

    def body(rank, world):
        ours = Ours(Keeps())
        ours._register_buffer_comm_hook(None, lambda state, buffers: touch(buffers["scale"]), Location.POST_FORWARD)
        version = ours.module.scale._version
        ours().sum().backward()
        assert ours.module.scale._version == version
        assert torch.equal(ours.module.weight.grad, torch.full((2,), 2.0))

    def touch(scale):
        scale.mul_(1.0)

    run_ranks(body, 2)


def test_a_buffer_hook_is_not_called_in_no_sync_nor_in_a_lone_evaluation():
    def body(rank, world):
        ours, state = Ours(Counts(rank)), []
        ours._register_buffer_comm_hook(state, summed)
        ours().sum().backward()
        assert len(state) == 1  # by default after forward
        if rank == 0:
            ours.eval()
            with torch.no_grad():
                ours()
            ours.train()
        assert len(state) == 1
        with ours.no_sync():
            ours().sum().backward()
            ours().sum().backward()
        # The first forward without sync still follows one that was with it, as with torch.
        assert len(state) == 2

    run_ranks(body, 2)


def test_what_is_not_callable_is_no_buffer_hook():
    def body(rank, world):
        for wrapper in (Stock, Ours):
            with pytest.raises(AssertionError):  # torch's own check, in torch 2.6 without a text
                wrapper(Counts(rank))._register_buffer_comm_hook(None, "sum")

    run_ranks(body, 1)


def test_futures_of_a_forward_without_backward_are_waited_for_before_the_next_one():
    def body(rank, world):
        ours, state = Ours(Counts(rank)), []
        ours._register_buffer_comm_hook(state, summed_later)
        for _ in range(2):
            ours()
        assert ours.module.at_entry[1].tolist() == [3.0, 3.0]

    run_ranks(body, 2)


def test_buffers_that_were_put_in_anothers_place_follow_rank_0():
    def body(rank, world):
        ours = Ours(ConvNet())
        ours(batch(rank, 0, 5, 36)).sum().backward()
        ours.module.norm.running_mean = torch.full((4,), rank + 5.0)
        ours.module.norm.momentum = 0.0
        ours(batch(rank, 1, 5, 36)).sum().backward()
        assert (ours.module.norm.running_mean == 5.0).all()
        assert ours.named_module_buffers["norm.running_mean"] is ours.module.norm.running_mean
        assert any(b is ours.module.norm.running_mean for b in ours.modules_buffers)

    run_ranks(body, 2)


@pytest.mark.parametrize("root", [0, 1])
def test_any_rank_can_be_the_one_whose_buffers_count(root):
    def body(rank, world):
        ours = Ours(ConvNet())
        ours.module.norm.running_mean.fill_(rank + 5.0)
        ours._sync_module_buffers(root)
        assert (ours.module.norm.running_mean == root + 5.0).all()
        chosen = [torch.full((3,), float(rank)), torch.full((2,), rank, dtype=torch.int64)]
        ours._default_broadcast_coalesced(chosen, 1 << 20, root)
        assert all((t == root).all() for t in chosen)

    run_ranks(body, 2)
