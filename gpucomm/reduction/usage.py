"""Whether every parameter got a gradient on every rank, and the error of stock DDP where that was not announced."""

import torch

from gpucomm import _core
from gpucomm.communicator import Communicator


class Usage:
    """allow_unused: parameters without a gradient are no error. static_graph: which ones have none never changes."""

    def __init__(self, names: list[str], *, allow_unused: bool, static_graph: bool) -> None:
        self.static_graph = static_graph
        self.error: str | None = None  # raised by the wrapper's next forward
        self._names = names
        self._allow_unused = allow_unused
        self._static_unused: list[int] | None = None

    def check(
        self, verdict: _core.Verdict, planned: list[int], params: list[torch.nn.Parameter], comm: Communicator
    ) -> None:
        """Notes the error if parameters in the plan got no gradient on some rank.

        Collective: one that is frozen on every rank is no error, one that is frozen on some is one on all of them.
        """
        if self._allow_unused and not self.static_graph:
            return
        used = set(verdict.used_by_all())
        unused = [i for i in planned if i not in used]
        if unused:
            trainable = comm.all_gather_bytes(bytes(params[i].requires_grad for i in unused))
            unused = [i for i, flags in zip(unused, zip(*trainable, strict=True), strict=True) if any(flags)]
        if self.static_graph:
            if self._static_unused is None:
                self._static_unused = unused
            elif unused != self._static_unused:
                changed = sorted(set(unused) ^ set(self._static_unused))
                self.error = (
                    "Your training graph has changed in this iteration, while static_graph=True was set: these "
                    f"parameters changed between having and not having a gradient: {self._named(changed)}"
                )
        elif unused:
            self.error = _UNUSED_TEXT.format(names=self._named(unused), indices=unused)

    def _named(self, indices: list[int]) -> str:
        return ", ".join(self._names[i] for i in indices)


# Says what stock DDP says in this situation, so that what scripts and people look for is there, and then the names.
_UNUSED_TEXT = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel, and by making sure all "
    "`forward` function outputs participate in calculating loss. Parameters which did not receive grad in the prior "
    "iteration: {names}. Parameter indices which did not receive grad: {indices}. (The gradients of that iteration "
    "were reduced over all ranks.)"
)
