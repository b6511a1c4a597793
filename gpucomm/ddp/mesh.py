"""`device_mesh=`: the group of a one-dimensional mesh, and parameters that are distributed over another dimension.

Gradients are reduced over the ranks of the mesh; each rank reduces what it holds of a distributed parameter, with the
ranks that hold the same part. Parameters stay distributed tensors, so state_dict is what it is without the wrapper.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpucomm.reduction.layout.local import is_distributed


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup | None:
    """The group that the two arguments ask for. Raises RuntimeError, as torch does, for both, or a mesh of more
    than one dimension; TypeError for what is no mesh."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if not all(hasattr(device_mesh, name) for name in ("ndim", "get_group")):
        raise TypeError(f"device_mesh is {device_mesh!r}, accepted is a torch.distributed.DeviceMesh of one dimension")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def check_placement(names: Sequence[str], params: Sequence[torch.Tensor], global_ranks: Sequence[int]) -> None:
    """Raises ValueError for a parameter that is distributed over ranks among which gradients are to be reduced.

    They hold different parts of it, or its gradient is reduced among them already (fully_shard, replicated DTensors).
    """
    peers = set(global_ranks) - {dist.get_rank()}
    for name, param in zip(names, params, strict=True):
        if not is_distributed(param):
            continue
        mesh: Any = param.device_mesh  # type: ignore[attr-defined]
        if shared := sorted(peers & set(mesh.mesh.flatten().tolist())):
            raise ValueError(
                f"parameter '{name}' is distributed over {mesh}, with rank(s) {shared} of the process group: "
                "gradients can be reduced only among ranks that hold the same part; give device_mesh= the dimension of "
                "the mesh over which the module is not distributed"
            )


def placement_of(tensor: torch.Tensor) -> str:
    """How a distributed tensor is placed, the same text on all ranks that hold the same part; "" for others."""
    if not is_distributed(tensor):
        return ""
    shape = tuple(tensor.device_mesh.mesh.shape)  # type: ignore[attr-defined]
    return f"{tensor.placements} over a mesh of shape {shape}"  # type: ignore[attr-defined]
