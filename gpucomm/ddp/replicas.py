"""Making replicas equal: the check that all ranks wrapped the same model, and the broadcast of rank 0's values."""

import pickle
from collections.abc import Iterable, Sequence

import torch

from gpucomm.communicator import Communicator
from gpucomm.ddp.mesh import placement_of
from gpucomm.errors import ModelsDiffer
from gpucomm.reduction.layout.buckets import MIB
from gpucomm.reduction.layout.local import as_bytes, local_of
from gpucomm.world import Exchange

# Tensors are brought together in pieces of this size, so that a broadcast needs little memory beside the model.
_CHUNK_BYTES = 32 * MIB


def check_same_model(
    names: Sequence[str], tensors: Sequence[torch.Tensor], global_ranks: Sequence[int], exchange: Exchange
) -> None:
    """Raises ModelsDiffer on every rank if number, order, shape, dtype, strides, requires_grad or placement differ.

    Of distributed tensors, shape and strides are those of the part that this rank holds. Collective.
    """
    mine = [
        (name, tuple(t.shape), str(t.dtype), tuple(t.stride()), t.requires_grad, placement_of(whole))
        for name, whole, t in zip(names, tensors, map(local_of, tensors), strict=True)
    ]
    everything = [pickle.loads(text) for text in exchange(pickle.dumps(mine))]
    first = everything[0]
    for rank, theirs in enumerate(everything):
        if theirs != first:
            here, there = f"rank {global_ranks[0]}", f"rank {global_ranks[rank]}"
            raise ModelsDiffer(f"the model differs between ranks: {_first_difference(first, theirs, here, there)}")


_FIELDS = ("name", "shape", "dtype", "strides", "requires_grad", "placement")


def _first_difference(first: list, theirs: list, here: str, there: str) -> str:
    for index, (a, b) in enumerate(zip(first, theirs, strict=False)):
        for field, x, y in zip(_FIELDS, a, b, strict=True):
            if x != y:
                where = f"parameter {index}" if field == "name" else f"parameter {index} ('{a[0]}')"
                return f"{where} has {field} {x} on {here} and {y} on {there}"
    longer, where = (first, here) if len(first) > len(theirs) else (theirs, there)
    extra = longer[min(len(first), len(theirs))][0]
    return f"{len(first)} parameters on {here}, {len(theirs)} on {there}; the first extra one is '{extra}' on {where}"


def broadcast_tensors(tensors: Iterable[torch.Tensor], comm: Communicator, root: int = 0) -> None:
    """Gives every rank rank root's values, as bytes, so of any dtype and layout; collective. Version counters stay.

    Of a distributed tensor, the part that the rank holds.
    """
    with torch.no_grad():
        chunk: list[torch.Tensor] = []
        nbytes = 0
        for tensor in tensors:
            part = _without_repeats(local_of(tensor))
            if chunk and (nbytes >= _CHUNK_BYTES or part.device != chunk[0].device):
                _broadcast_chunk(chunk, comm, root)
                chunk, nbytes = [], 0
            chunk.append(part)
            nbytes += part.nbytes
        _broadcast_chunk(chunk, comm, root)


def _broadcast_chunk(tensors: list[torch.Tensor], comm: Communicator, root: int) -> None:
    total = sum(t.numel() * t.element_size() for t in tensors)
    if total == 0:
        return
    flat = torch.empty(total, dtype=torch.uint8, device=tensors[0].device)
    if comm.rank == root:
        torch.cat([as_bytes(t) for t in tensors], out=flat)
    comm.broadcast(flat, root)
    if comm.rank == root:
        return
    offset = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        # clone: the piece starts at any byte, a view as another dtype needs its alignment.
        piece = flat[offset : offset + nbytes].clone().view(tensor.dtype).view(tensor.shape)
        tensor.data.copy_(piece)  # data, unlike detach(), has a version counter of its own
        offset += nbytes


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Each element of memory once: an expanded tensor cannot be written to."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(sizes, [stride or 1 for stride in tensor.stride()])
