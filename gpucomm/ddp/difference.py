"""Where replicas differ first, once checksums have shown that they do.

    tensors    the ranks exchange the checksums of all tensors that may be meant; the first that differs counts
    element    then checksums of ever shorter parts of that tensor, in the end the elements themselves

Each turn is decided from what all ranks sent, so that all take the same ones and raise the same.
"""

import pickle
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NoReturn

import torch

from gpucomm import _core, cuda
from gpucomm.communicator import Communicator
from gpucomm.errors import CommError, ReplicasDiffer
from gpucomm.reduction.layout.local import as_bytes, local_of

# A tensor is looked at in so many parts a turn, until a part has at most so many elements.
_PARTS = 256
_PART_NUMEL = 256


class Replica:
    """This rank's tensors: parameters by their index, then buffers."""

    def __init__(
        self, names: Sequence[str], params: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self.names = [*names, *buffers]
        self.tensors = [*params, *buffers.values()]
        self.parameters = range(len(params))
        self.buffers = range(len(params), len(self.tensors))

    def local(self, index: int) -> torch.Tensor:
        """The tensor; of a DTensor the part that lies here, of which the other ranks have a copy."""
        return local_of(self.tensors[index])

    def bytes_of(self, index: int) -> torch.Tensor:
        """Its elements in the order of their indices, whatever its strides: ranks may differ in those."""
        return cuda.on_host(as_bytes(self.local(index)))

    def describe(self, index: int) -> tuple[str, torch.Size, str]:
        """What is equal on every rank, or there is no use in comparing elements."""
        tensor = self.local(index)
        kind = "parameter" if index in self.parameters else "buffer"
        return kind, tensor.shape, str(tensor.dtype)


def raise_first_difference(
    replica: Replica,
    suspects: Sequence[int],
    checksums: Sequence[int],
    comm: Communicator,
    transport: _core.Transport,
    iteration: int,
) -> NoReturn:
    """Raises ReplicasDiffer on every rank for the first of the suspects that differs; collective.

    suspects, ascending: indices of this rank's tensors, of which at least one differs from a peer's. checksums: of all
    its tensors. Raises CommError if none does: then it is the plans of the ranks that differ.
    """
    mine = {replica.names[i]: (*replica.describe(i), checksums[i]) for i in suspects}
    everything = [pickle.loads(text) for text in comm.all_gather_bytes(pickle.dumps(mine))]
    names = list(dict.fromkeys(name for theirs in everything for name in theirs))
    rows = {name: [theirs.get(name) for theirs in everything] for name in names}
    differing = [name for name in names if len(set(rows[name])) > 1]
    if not differing:
        raise CommError(
            "the bucket plans of the ranks differ (and not their tensors): were they given other arguments?"
        )
    name, row = differing[0], rows[differing[0]]
    kinds = {entry and entry[:-1] for entry in row}
    if len(kinds) > 1:
        where = _by_value([f"a {e[0]} of {e[2]} {list(e[1])}" if e else "absent" for e in row], transport)
    else:
        where = _first_element(replica, replica.names.index(name), comm, transport)
    ranks = [transport.global_rank(rank) for rank in _outvoted(row)]
    others = f"; so do {len(differing) - 1} other tensors" if len(differing) > 1 else ""
    when = f"after iteration {iteration}" if iteration else "before the first iteration"
    kind = next(entry[0] for entry in row if entry)
    raise ReplicasDiffer(
        f"the replicas differ {when}: {kind} '{name}' on {_ranks_text(ranks)}: {where}{others}",
        name,
        ranks,
    )


def _first_element(replica: Replica, index: int, comm: Communicator, transport: _core.Transport) -> str:
    tensor = replica.local(index)
    found = find_element(replica.bytes_of(index), tensor.element_size(), comm)
    if found is None:
        return "but no more when its elements were compared: something writes to it meanwhile"
    position, elements = found
    part = "" if tensor is replica.tensors[index] else " of its local part"
    coordinates = [int(x) for x in torch.unravel_index(torch.tensor(position), tensor.shape)]
    values = [repr(torch.frombuffer(bytearray(element), dtype=tensor.dtype).item()) for element in elements]
    if len(set(values)) < len(set(elements)):  # NaN of different bits
        values = [f"{value} (0x{element[::-1].hex()})" for value, element in zip(values, elements, strict=True)]
    return f"first in element {position}{part}, at {coordinates}, which is {_by_value(values, transport)}"


def find_element(mine: torch.Tensor, itemsize: int, comm: Communicator) -> tuple[int, list[bytes]] | None:
    """Index of the first element that differs between ranks and its bytes on each of them; None if none does.

    mine: uint8, flat, of the same length on every rank. Collective.
    """
    begin, end = 0, mine.numel() // itemsize

    def part(start: int, stop: int) -> torch.Tensor:
        return mine[start * itemsize : min(stop, end) * itemsize]

    while end - begin > _PART_NUMEL:
        numel = -(-(end - begin) // _PARTS)
        starts = range(begin, end, numel)
        sums = array("Q", [_core.checksum(part(start, start + numel)) for start in starts])
        rows = [array("Q", text) for text in comm.all_gather_bytes(sums.tobytes())]
        differing = _first_differing(list(zip(*rows, strict=True)))
        if differing is None:
            return None
        begin, end = starts[differing], min(starts[differing] + numel, end)
    everything = comm.all_gather_bytes(bytes(part(begin, end).tolist()))
    columns = [[text[at : at + itemsize] for text in everything] for at in range(0, len(everything[0]), itemsize)]
    differing = _first_differing(columns)
    return None if differing is None else (begin + differing, columns[differing])


def _first_differing(columns: Sequence[Sequence[Hashable]]) -> int | None:
    return next((index for index, column in enumerate(columns) if len(set(column)) > 1), None)


def _outvoted(row: Sequence[Hashable]) -> list[int]:
    """The ranks that have not what most have; all of them where two values are as frequent."""
    (most, count), *others = Counter(row).most_common(2)
    tied = any(count == other for _, other in others)
    return [rank for rank, value in enumerate(row) if tied or value != most]


def _by_value(values: Sequence[str], transport: _core.Transport) -> str:
    """Each value and the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(transport.global_rank(rank))
    return ", ".join(f"{value} on {_ranks_text(holders)}" for value, holders in ranks.items())


def _ranks_text(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
