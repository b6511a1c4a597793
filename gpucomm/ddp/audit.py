"""The audit: are the replicas of a wrapper still equal, bit for bit?

One exchange compares a checksum for each bucket's parameters, one for the parameters in no bucket, and one for the
buffers. What differs is found by ddp/difference.py.
"""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._compile import _disable_dynamo

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.ddp.difference import Replica, raise_first_difference

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel


@dataclass(frozen=True)
class AuditReport:
    """What was compared and found equal. parameters, buffers: numbers of tensors; nbytes: theirs, on each rank."""

    parameters: int
    buffers: int
    nbytes: int


class Audit:
    """When a wrapper's replicas are compared: by hand, and in the first forward after every N-th reduction.

    every: reductions from one audit to the next, 0: by hand alone. Construction is collective; it raises ValueError on
    every rank if they ask for different intervals.
    """

    def __init__(self, every: int, comm: Communicator) -> None:
        by_rank = [int(text) for text in comm.all_gather_bytes(str(every).encode())]
        if len(set(by_rank)) > 1:
            raise ValueError(f"audit_every has to be the same on every rank, by rank it is {by_rank}")
        self.every = every
        # Reductions and batches that normalisation had counted when every rank had rank 0's buffers: a forward since,
        # past the wrapper, may have changed them on each rank by itself, until the next training forward of the wrapper
        # brings them together. None: one of the wrapper's may have.
        self._equal_at: tuple[int, list[int]] | None = None
        self._latest = 0

    def note_equal_buffers(self, ddp: "DistributedDataParallel", iteration: int) -> None:
        """Every rank has the same buffers now, after so many reductions."""
        self._equal_at = (iteration, _batches_counted(ddp))

    def forget_buffers(self) -> None:
        """What follows may change them, on each rank by itself."""
        self._equal_at = None

    def before_forward(self, ddp: "DistributedDataParallel") -> None:
        """In a forward with gradients enabled, its buffers brought together: runs the audit if it is due.

        The number of reductions decides, which the ranks have in common; in that of forwards they may differ. Not
        inside a backward, where checkpointing runs forwards again. The caller leaves it out while ranks have joined
        (torch's Join context), for their parameters are old until all have.
        """
        if self.every:
            self._run_if_due(ddp)

    @_disable_dynamo  # for a wrapper that is compiled
    def _run_if_due(self, ddp: "DistributedDataParallel") -> None:
        engine = ddp._reduction.engine
        iteration = engine.iteration
        if iteration % self.every or iteration == self._latest or engine.mode != _core.Mode.IDLE:
            return
        self._latest = iteration
        self.run(ddp)

    @torch.no_grad()
    def run(self, ddp: "DistributedDataParallel") -> AuditReport:
        """Compares the replicas now; collective. See DistributedDataParallel.audit."""
        reducer, comm = ddp._reduction, ddp._comm
        reducer.before_collective()
        equal_buffers = self._equal_at == (reducer.engine.iteration, _batches_counted(ddp)) and ddp.forward_sync_buffers
        if equal_buffers:
            ddp._assign_modules_buffers()  # a program may put a new tensor in a buffer's place
        replica = Replica(reducer.names, reducer.params, ddp.named_module_buffers if equal_buffers else {})
        groups = [[slot.parameter for slot in bucket.slots] for bucket in reducer.plan.buckets]
        planned = {index for group in groups for index in group}
        groups.append([index for index in replica.parameters if index not in planned])
        groups.append(list(replica.buffers))

        checksums = [_core.checksum(replica.bytes_of(index)) for index in range(len(replica.tensors))]
        mine = array("Q", [equal_buffers, *(checksum_of([checksums[i] for i in group]) for group in groups)])
        rows = [array("Q", text) for text in comm.all_gather_bytes(mine.tobytes())]
        if not all(row[0] for row in rows):
            groups.pop()  # somebody's may differ by right
        uneven = len({len(row) for row in rows}) > 1  # of different plans
        differing = [group for at, group in enumerate(groups, 1) if uneven or len({row[at] for row in rows}) > 1]
        if differing:
            suspects = sorted(i for group in differing for i in group)
            raise_first_difference(replica, suspects, checksums, comm, reducer.transport, reducer.engine.iteration)
        compared = [i for group in groups for i in group]
        buffers = sum(i in replica.buffers for i in compared)
        nbytes = sum(replica.local(i).nbytes for i in compared)
        return AuditReport(len(compared) - buffers, buffers, nbytes)


def _batches_counted(ddp: "DistributedDataParallel") -> list[int]:
    """How often the counters were written of normalisation layers that keep statistics of the batches of training."""
    buffers = ddp.named_module_buffers.items()
    counters = [buffer for name, buffer in buffers if name.endswith("num_batches_tracked")]
    return [-1 if counter.is_inference() else counter._version for counter in counters]


def checksum_of(checksums: list[int]) -> int:
    return _core.checksum(array("Q", checksums).tobytes())
