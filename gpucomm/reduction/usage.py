"""Whether every parameter got a gradient on every rank, and the error of stock DDP where that was not announced."""

from contextlib import AbstractContextManager, nullcontext

import torch

from gpucomm import _core
from gpucomm.communicator import Communicator


class Usage:
    """params, names: by index. rank: this one's, in the default group.

    allow_unused: parameters without a gradient are no error. static_graph: which ones have none never changes.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        names: list[str],
        comm: Communicator,
        rank: int,
        *,
        allow_unused: bool,
        static_graph: bool,
    ) -> None:
        self.static_graph = static_graph
        self.error: str | None = None  # raised by the wrapper's next forward, and those that follow
        self.change: str | None = None  # raised at the end of the backward in which a static graph was not
        self.here: list[int] = []  # without a gradient on this rank in the last reduction
        self._varies_here: bool | None = None  # from one iteration to the next; None: there was none yet
        self._params = params
        self._names = names
        self._comm = comm
        self._rank = rank
        self.allow_unused = allow_unused
        self._static_unused: list[int] | None = None
        self.is_constant = True  # what is used has been the same in all iterations
        self._used_before: list[int] | str | None = None

    def search_range(self) -> AbstractContextManager:
        """Around the search for parameters without a gradient: what profiles of stock DDP show of it."""
        named = self.allow_unused and not self.static_graph
        return torch.autograd.profiler.record_function("search_unused_parameters") if named else nullcontext()

    @property
    def is_worth_forecasting(self) -> bool:
        """Whether parameters may be unused, and this rank does not always use the same ones."""
        return self.allow_unused and bool(self._varies_here)

    def note_here(self, unused: list[int]) -> None:
        """unused: parameters that have a slot and got no gradient on this rank in this iteration."""
        if self._varies_here is None:
            self._varies_here = False
        elif unused != self.here:
            self._varies_here = True
        self.here = unused

    def note(self, verdict: _core.Verdict) -> None:
        """Remembers what all ranks used, after each iteration."""
        used = "everything in the plan" if verdict.all_used else verdict.used_by_all()
        if self.is_constant and self._used_before is not None and used != self._used_before:
            self.is_constant = False
        self._used_before = used

    def check(self, verdict: _core.Verdict, planned: list[int]) -> None:
        """Notes the error if parameters in the plan got no gradient on some rank.

        Collective: one that is frozen on every rank is no error, one that is frozen on some is one on all of them.
        """
        if self.allow_unused and not self.static_graph:
            return
        used = set(verdict.used_by_all())
        unused = [i for i in planned if i not in used]
        if unused:
            trainable = self._comm.all_gather_bytes(bytes(self._params[i].requires_grad for i in unused))
            unused = [i for i, flags in zip(unused, zip(*trainable, strict=True), strict=True) if any(flags)]
        if not self.static_graph:
            if unused:
                self.error = _UNUSED_TEXT + self._which(unused)
        elif self._static_unused is None:
            self._static_unused = unused
        elif unused != self._static_unused:
            changed = sorted(set(unused) ^ set(self._static_unused))
            self.change = f"{_CHANGED_TEXT}{self._named(changed)}"
            self.error = _CHANGED_BEFORE_TEXT + self._which(changed)

    def _which(self, indices: list[int]) -> str:
        """In torch's words, which are about the rank that speaks."""
        rank, mine = self._rank, set(self.here)
        here = [i for i in indices if i in mine]
        text = (
            f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, here)) or 'none'}\n"
            f"Parameters which did not receive grad for rank {rank}: {self._named(here) or 'none'}"
        )
        others = [i for i in indices if i not in mine]
        return text + (
            f"\nParameters which did not receive grad on another rank: {self._named(others)}" if others else ""
        )

    def _named(self, indices: list[int]) -> str:
        return ", ".join(self._names[i] for i in indices)


# Say what stock DDP says in these situations, so that what scripts and people look for is there; names follow.
_UNUSED_TEXT = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel, and by making sure all "
    "`forward` function outputs participate in calculating loss. (The gradients of that iteration were reduced over "
    "all ranks. There is no need to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: "
    "names are always given.)\n"
)
_CHANGED_TEXT = (
    "Your training graph has changed in this iteration, while static_graph=True was set: these parameters changed "
    "between having and not having a gradient: "
)
_CHANGED_BEFORE_TEXT = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then got "
    "unused in the second iteration. this is not compatible with static_graph set to True.\n"
)
