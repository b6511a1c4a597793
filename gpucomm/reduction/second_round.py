"""Gradients that could not go through their slot: reduced on their own after the buckets, in the same iteration.

A second gradient of a parameter whose slot was already packed, one of a parameter without a fitting slot (unfrozen,
replaced, of another dtype), or a sparse one. The reduction is linear, so adding the parts is exact.
"""

import pickle
from typing import NamedTuple

import torch

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.errors import StepFailed
from gpucomm.reduction.layout.local import checksum, local_grad, local_of
from gpucomm.reduction.layout.slots import Slots
from gpucomm.reduction.unpack import Means


class _Kind(NamedTuple):
    """What a rank's contribution is like (of a distributed one, its part). sparse_dim: 0 where it is dense, or none.

    given: the rank has one. replaced: the rank's program put another object in the parameter's place.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse_dim: int
    given: bool
    replaced: bool


class SecondRound:
    """What this rank has for the second round of an iteration, and the round itself.

    params, names: by index, as on every rank. transport: that of comm.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        names: list[str],
        engine: _core.Engine,
        comm: Communicator,
        transport: _core.Transport,
    ) -> None:
        self._params = params
        self._names = names
        self._engine = engine
        self._comm = comm
        self._transport = transport
        self._grads: dict[int, torch.Tensor] = {}
        self._replaced: set[int] = set()

    def note_replaced(self, parameter: int) -> None:
        """The program put another object in its place: once all ranks have, its values are compared."""
        self._replaced.add(parameter)

    def ask_about_replaced(self) -> None:
        """When an iteration is armed."""
        for parameter in self._replaced:
            self._engine.ask_about(parameter)

    def add(self, parameter: int, grad: torch.Tensor) -> None:
        """Has a contribution of this rank reduced, by all ranks. grad: taken over, the caller lets go of it."""
        kept = self._grads.get(parameter)
        self._grads[parameter] = grad.detach().clone() if kept is None else kept + grad.detach()
        self._engine.request_second_round(parameter)

    def add_kept(self, parameters: list[int], slots: Slots) -> None:
        """Of those that others asked for and this rank did not use: what `.grad` still holds, if no slot took it."""
        for i in parameters:
            grad = local_grad(self._params[i])
            if i not in self._grads and grad is not None and slots.fitting_view(i, grad) is None:
                self._grads[i] = grad.detach().clone()

    def clear(self) -> None:
        self._grads.clear()

    def run(self, parameters: list[int], means: Means) -> None:
        """Reduces the union of what all ranks asked for, into the means; collective, after the buckets are reduced.

        A mean is sparse if a rank's contribution is.
        Raises StepFailed on every rank if a parameter's shape or dtype differs between ranks.
        """
        kinds = self._agree_on_kinds(parameters)
        self._compare_replaced([i for i, kind in kinds.items() if kind.replaced])
        kinds = {i: kind for i, kind in kinds.items() if kind.given}
        for dtype in sorted({kind.dtype for kind in kinds.values() if not kind.sparse_dim}, key=str):
            members = [i for i, kind in kinds.items() if kind.dtype == dtype and not kind.sparse_dim]
            parts = [self._part(i, kinds[i].shape, dtype) for i in members]
            flat = torch.cat([part.to(dtype).reshape(-1) for part in parts])
            self._comm.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat, "avg")
            for i, mean in zip(members, flat.split([part.numel() for part in parts]), strict=True):
                means.add(i, mean.view(kinds[i].shape))
        for i, kind in kinds.items():
            if kind.sparse_dim:
                means.add(i, _sparse_mean(self._grads.get(i), kind, self._comm))

    def _part(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        grad = self._grads.get(index)
        return torch.zeros(shape, dtype=dtype, device=self._params[index].device) if grad is None else grad

    def _agree_on_kinds(self, parameters: list[int]) -> dict[int, _Kind]:
        mine = []
        for i in parameters:
            grad, param = self._grads.get(i), local_of(self._params[i])
            sparse_dim = grad.sparse_dim() if grad is not None and grad.layout == torch.sparse_coo else 0
            mine.append(_Kind(tuple(param.shape), param.dtype, sparse_dim, grad is not None, i in self._replaced))
        everybody = [pickle.loads(text) for text in self._comm.all_gather_bytes(pickle.dumps(mine))]
        for rank, theirs in enumerate(everybody):
            for i, a, b in zip(parameters, everybody[0], theirs, strict=True):
                if a[:2] != b[:2]:
                    name = self._transport.global_rank
                    raise StepFailed(
                        f"parameter '{self._names[i]}' is {a.dtype} {list(a.shape)} on rank {name(0)} and "
                        f"{b.dtype} {list(b.shape)} on rank {name(rank)}"
                    )
        return {
            i: kinds[0]._replace(
                sparse_dim=max(kind.sparse_dim for kind in kinds),
                given=any(kind.given for kind in kinds),
                replaced=any(kind.replaced for kind in kinds),
            )
            for i, kinds in zip(parameters, zip(*everybody, strict=True), strict=True)
        }

    def _compare_replaced(self, parameters: list[int]) -> None:
        """Raises StepFailed on every rank if one's values differ: each rank may have drawn its own."""
        if not parameters:
            return
        mine = [checksum(local_of(self._params[i])) for i in parameters]
        everybody = [pickle.loads(text) for text in self._comm.all_gather_bytes(pickle.dumps(mine))]
        for i, checksums in zip(parameters, zip(*everybody, strict=True), strict=True):
            if len(set(checksums)) > 1:
                raise StepFailed(
                    f"parameter '{self._names[i]}' was replaced after wrapping, and its values differ between ranks: "
                    "give all ranks the same ones (broadcast rank 0's), or wrap the module again"
                )
        self._replaced.difference_update(parameters)


def _sparse_mean(mine: torch.Tensor | None, kind: _Kind, comm: Communicator) -> torch.Tensor:
    """The coalesced mean of all ranks' contributions, added in rank order; collective."""
    if mine is None:
        mine = torch.zeros(kind.shape, dtype=kind.dtype).to_sparse(kind.sparse_dim)
    mine = (mine if mine.layout == torch.sparse_coo else mine.to_sparse(kind.sparse_dim)).coalesce()
    if mine.sparse_dim() != kind.sparse_dim:
        mine = mine.to_dense().to_sparse(kind.sparse_dim)
    indices = comm.all_gather_uneven(mine.indices().T.contiguous().view(-1))
    values = comm.all_gather_uneven((mine.values() / comm.world_size).contiguous().view(-1).view(torch.uint8))
    tail = kind.shape[kind.sparse_dim :]
    return torch.sparse_coo_tensor(
        torch.cat([part.view(-1, kind.sparse_dim) for part in indices]).T,
        torch.cat([part.view(kind.dtype).view(-1, *tail) for part in values]),
        kind.shape,
        check_invariants=False,  # said aloud, else torch warns
    ).coalesce()
