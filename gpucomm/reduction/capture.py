"""Iterations of which a CUDA graph is captured: replays repeat what the device does, nothing that the host does."""

from gpucomm.gpus import Gpus
from gpucomm.reduction.agreement.finite import FiniteCheck
from gpucomm.reduction.agreement.headers import Agreement
from gpucomm.reduction.layout.buckets import BucketMemory
from gpucomm.reduction.layout.slots import Slots


class Captures:
    """Those in which a wrapper's gradients are reduced. gpus: where they are; None: on the CPU, which has no graphs."""

    def __init__(self, gpus: Gpus | None) -> None:
        self._gpus = gpus
        # Replays write there as long as the program has the graph, which nobody tells.
        self._memories: list[BucketMemory] = []

    def is_under_way(self) -> bool:
        """Whether what the program does at present is captured."""
        return self._gpus is not None and self._gpus.is_capturing()

    def begin(self, slots: Slots, finite: FiniteCheck, agreement: Agreement) -> None:
        """A backward begins in one. Raises RuntimeError, before anything is started, for what replays would not do."""
        fault = _fault(slots, finite, agreement)
        if fault is not None:
            raise RuntimeError(f"a CUDA graph of an iteration cannot be captured: {fault}")
        known = {id(memory) for memory in self._memories}
        self._memories.extend(memory for memory in slots.memories if id(memory) not in known)


def _fault(slots: Slots, finite: FiniteCheck, agreement: Agreement) -> str | None:
    if finite.policy != "pass":
        return (
            f"nonfinite='{finite.policy}' has the host read in every iteration what the GPU found, which a replay does "
            "not: use nonfinite='pass', and look at the loss between replays"
        )
    if agreement.weight.total is not None:
        return "weight() divides by what the hosts tell each other in every iteration: divide the loss on the GPU"
    if agreement.comm_hooks is not None:
        return "a communication hook is called by the host"
    if not slots.is_final or slots.next_plan is not None:
        return (
            "the order of the gradients is not settled, and buckets would move: run two iterations of the same kind "
            "before, each to its end"
        )
    if slots.stale_buckets():
        return (
            "the program keeps a gradient of an earlier iteration, whose bucket would need new memory: drop it, and "
            "call zero_grad() before"
        )
    return None
