"""The memory that buckets lie in: a block for each plan, a page-aligned part of it for each bucket."""

import json
import warnings

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.gpus import Gpus
from gpucomm.reduction.layout.buckets import BucketMemory, BucketPlan

# Buckets of a block start at multiples of a page.
_BUCKET_ALIGNMENT = 4096


class Arena:
    """Of a transport's memory. Gradients may lie in it as long as the program keeps them: it is never used again."""

    def __init__(self, transport: _core.Transport) -> None:
        self._transport = transport

    def take(self, plan: BucketPlan) -> list[_core.Memory]:
        """Memory for each bucket of a plan that comes into force; what was taken before is not used any more."""
        starts, end = [], 0
        for bucket in plan.buckets:
            starts.append(end)
            end += -(-max(bucket.nbytes, 1) // _BUCKET_ALIGNMENT) * _BUCKET_ALIGNMENT
        block = self._block(end)
        return [block.slice(start, max(bucket.nbytes, 1)) for start, bucket in zip(starts, plan.buckets, strict=True)]

    def replace(self, nbytes: int) -> _core.Memory:
        """Memory for one bucket whose gradients the program keeps; on this rank alone."""
        return self._transport.allocate(max(nbytes, 1))

    def warm_up(self, memories: list[BucketMemory]) -> None:
        """Has whatever is made at first use made now, for buckets of these sizes; collective."""

    def _block(self, nbytes: int) -> _core.Memory:
        return self._transport.allocate(nbytes)


class GpuArena(Arena):
    """On a GPU. NCCL connects ranks when an algorithm is first used, which hangs on the size: before the first backward
    each size is reduced once."""

    def __init__(self, gpus: Gpus, comm: Communicator) -> None:
        super().__init__(gpus.transport)
        self._comm = comm
        self._warm: set[tuple[str, int]] = set()

    def warm_up(self, memories: list[BucketMemory]) -> None:
        for memory in memories:
            size = str(memory.flat.dtype), memory.flat.numel()
            if size not in self._warm and memory.flat.numel() > 0:
                self._warm.add(size)
                self._comm.all_reduce(memory.flat)


class RegisteredArena(GpuArena):
    """One that NCCL knows of, if it can be had. No gradient lies in it (Wire.apart), so that a new plan uses the same
    block: registering takes all ranks, and the host waits for its GPU before a block is taken back."""

    def __init__(self, gpus: Gpus, comm: Communicator) -> None:
        super().__init__(gpus, comm)
        self._gpus = gpus
        self._memory: _core.Memory | None = None
        self.kind = ""  # of the registration: "symmetric", "plain", or none

    def _block(self, nbytes: int) -> _core.Memory:
        if self._memory is not None:
            self._gpus.stream.synchronize()  # the last plan's work: none of it is the program's own
        if self._memory is not None and self._memory.nbytes >= nbytes:  # alike on all ranks, whose plans are the same
            self._gpus.transport.clear(self._memory)  # what lies between slots is zero
        else:
            if self._memory is not None:
                self._gpus.transport.deregister_memory(self._memory)
            self._memory = super()._block(nbytes)
            self._register(self._memory)
        return self._memory

    def _register(self, memory: _core.Memory) -> None:
        transport = self._gpus.transport
        self.kind = ""
        for kind in ("symmetric", "plain"):
            mine = transport.register_memory(memory, kind == "symmetric")
            if all(json.loads(text) for text in self._comm.all_gather_bytes(json.dumps(mine).encode())):
                self.kind = kind
                return
            if mine:
                transport.deregister_memory(memory)
        warnings.warn(
            "nccl_options: register_buffers=True, but this NCCL cannot register memory on all ranks (one older than "
            "2.19, or ranks that share a GPU); buckets are reduced unregistered",
            stacklevel=2,
        )


def make_arena(transport: _core.Transport, comm: Communicator, gpus: Gpus | None) -> Arena:
    """transport: of host memory. Collective, with those that take from it."""
    if gpus is None:
        return Arena(transport)
    return RegisteredArena(gpus, comm) if gpus.options.register_buffers else GpuArena(gpus, comm)
