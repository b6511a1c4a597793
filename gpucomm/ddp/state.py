"""A wrapper taken apart and put together again: for pickle and deepcopy, and to go on in another process group."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpucomm.ddp.construction import make_table
from gpucomm.world import World, withdrawing

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel

# What talks to other ranks: made anew.
_CONNECTED = ("process_group", "reducer", "logger", "_comm", "_audit", "_reduction")


def of(ddp: "DistributedDataParallel") -> dict[str, Any]:
    """The attributes of a wrapper that can be copied.

    Raises RuntimeError unless its process group is the default one, TypeError if it was given a transport object: a
    copy could find neither.
    """
    ddp._check_default_group()
    if not isinstance(ddp._arguments.transport, str):
        raise TypeError("a DistributedDataParallel that was given a transport object cannot be copied or pickled")
    attributes = {name: value for name, value in vars(ddp).items() if name not in _CONNECTED}
    attributes["_arguments"] = replace(ddp._arguments, process_group=None, device_mesh=None)
    # To torch's hooks, and to the built-in ones, a state of None is the default group.
    group = ddp.process_group
    attributes["_comm_hooks"] = [(hook, None if state is group else state) for hook, state in ddp._comm_hooks]
    return attributes


def restore(ddp: "DistributedDataParallel", attributes: dict[str, Any]) -> None:
    """Makes a wrapper of its own, over the default group, from what of() gave; collective. Values stay each rank's."""
    with withdrawing(None):
        arguments = attributes["_arguments"]
        world = World.of(None, arguments.timeout, arguments.transport, str(arguments.wire))
        torch.nn.Module.__setstate__(ddp, attributes)
        table = make_table(ddp)
    ddp._connect(world, table, init_sync=False)


def move(ddp: "DistributedDataParallel", group: dist.ProcessGroup) -> None:
    """Goes on among the ranks of another group, a rank outside of it as before; collective over that group.

    The plan is made anew, gradients and buffers stay; so do communication hooks, whose state is the program's business
    where it holds the old group. Raises ValueError if it was given a transport object.
    """
    ddp.reducer._reset_state()
    if dist.get_rank(group) < 0:
        return
    with withdrawing(group):
        if not isinstance(ddp._arguments.transport, str):
            raise ValueError("a transport object serves one group only, so this wrapper cannot move to another")
        arguments = ddp._arguments
        world = World.of(group, arguments.timeout, arguments.transport, str(arguments.wire))
    ddp._reduction.close()
    ddp._connect(world, make_table(ddp), init_sync=False)
