"""Uneven inputs: what a rank that has no more data does while its peers train on.

torch's Join context tells at each forward whether ranks are left. One that has joined then mirrors what the forward and
backward of its peers ask of it: values for the buffers, and a reduction to which it adds nothing.
"""

import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import JoinHook

from gpucomm.ddp.replicas import broadcast_tensors

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel


class DdpJoinHook(JoinHook):
    """divide_by_initial_world_size: gradients are divided by the number of all ranks; else by that of those left."""

    def __init__(self, ddp: "DistributedDataParallel", divide_by_initial_world_size: bool) -> None:
        super().__init__()
        if not isinstance(divide_by_initial_world_size, bool):
            raise TypeError(f"divide_by_initial_world_size is {divide_by_initial_world_size!r}, accepted is a bool")
        self._ddp: DistributedDataParallel = weakref.proxy(ddp)  # type: ignore[assignment]
        ddp.logger._set_uneven_input_join()
        ddp._reduction.agreement.mean_of_active = not divide_by_initial_world_size

    def main_hook(self) -> None:
        """One iteration of the others; collective."""
        ddp, reduction = self._ddp, self._ddp._reduction
        source, syncs_buffers, reduce, _ = meet_in_forward(ddp, joined=True)
        if syncs_buffers:
            ddp.sync_buffers(source)
        if reduce:
            reduction.keep_company()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives everybody the model of the rank that trained last; collective."""
        ddp, reduction = self._ddp, self._ddp._reduction
        reduction.agreement.mean_of_active = False
        last = max(rank for rank, says in enumerate(ddp._comm.all_gather_bytes(bytes([is_last_joiner]))) if says[0])
        ddp._authoritative_rank = last
        tensors: list[Any] = [*ddp._module_parameters]
        if ddp.forward_sync_buffers:
            ddp._assign_modules_buffers()
            tensors += ddp.modules_buffers
        broadcast_tensors(tensors, ddp._comm, last)


def meet_in_forward(ddp: "DistributedDataParallel", joined: bool) -> tuple[int, bool, bool, bool]:
    """All ranks say in a training forward whether they have joined and what they are about to do; collective.

    Returns the rank whose buffers count, whether they are brought together in this forward, whether the backward that
    follows is reduced, and whether nobody has joined. What those that have not joined say is what happens.
    """
    mine = bytes([joined, ddp.will_sync_module_buffers(), ddp.require_backward_grad_sync])
    active = [(rank, says) for rank, says in enumerate(ddp._comm.all_gather_bytes(mine)) if not says[0]]
    # As with torch: the last of them, for rank 0 may have joined with buffers that have grown old.
    syncs_buffers, reduce = any(says[1] for _, says in active), any(says[2] for _, says in active)
    return max(rank for rank, _ in active), syncs_buffers, reduce, len(active) == ddp._comm.world_size
