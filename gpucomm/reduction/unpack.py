"""unpack: the means of an iteration on their way from the buckets, and from beside them, into `.grad`."""

from collections.abc import Iterator

import torch

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.reduction.graph import with_graph
from gpucomm.reduction.layout.grads import shared_grads
from gpucomm.reduction.layout.local import placed_like
from gpucomm.reduction.layout.slots import Slots


class Means:
    """What this iteration's gradients became: in the slots, and in here what has no slot that fits."""

    def __init__(self, slots: Slots, params: list[torch.nn.Parameter], engine: _core.Engine) -> None:
        self._slots = slots
        self._params = params
        self._engine = engine
        self._slotless: dict[int, torch.Tensor] = {}
        self.sparse: dict[int, torch.Tensor] = {}
        self._kept: dict[int, torch.Tensor] = {}  # what slots held of parameters that nobody may have used this time
        self._programs: dict[int, torch.Tensor] = {}  # what is `.grad` because the program wants it to be
        self._own: dict[int, torch.Tensor] | None = None  # this rank's gradients with their graph, if they have one
        self._saw_graph = False

    def clear(self) -> None:
        """At the end of an iteration."""
        self._slotless.clear()
        self.sparse.clear()
        self._kept.clear()
        self._programs.clear()
        self._own = None

    # ---- while gradients come

    def arm(self, with_graph: bool) -> None:
        """with_graph: the gradients that come have a graph (create_graph=True), and their means are to get one."""
        self._own = {} if with_graph else None
        self._saw_graph = self._saw_graph or with_graph
        self._engine.set_by_hand(with_graph)

    def note_programs(self, first: int) -> None:
        """What is `.grad` already, and somebody else holds too (a flat buffer, a list), stays it: autograd adds to it
        in place, so the program expects the mean there. first: whose gradient just came."""
        others = _core.other_grads(self._params, self._slots.grads)
        for index in shared_grads(self._params, others, first) if others else ():
            grad = self._params[index].grad
            if grad is not None and self._slots.views[index] is not None:
                self._programs[index] = grad

    def hold_back(self) -> None:
        """Once means have had a graph, backwards may contain a collective: see graph.py."""
        if self._saw_graph:
            for bucket in range(len(self._slots.plan.buckets)):
                self._engine.hold_back(bucket)

    def note_own(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Remembers a gradient with its graph; returns it without one."""
        if self._own is None:
            return grad
        with torch.enable_grad():
            self._own[index] = self._own[index] + grad if index in self._own else grad
        return grad.detach()

    def keep(self, index: int, grad: torch.Tensor) -> None:
        """What `.grad` held, in the slot itself: it comes back there if nobody used the parameter."""
        self._kept[index] = grad.clone()

    # ---- once they are reduced

    def add(self, index: int, mean: torch.Tensor) -> None:
        """The second round's mean of a parameter: added to its slot, or its gradient where no slot fits."""
        if mean.layout != torch.strided:
            slot = self._slots.views[index]
            if slot is not None and slot.shape == mean.shape and slot.any():  # on all ranks alike, for it is reduced
                slot.add_(mean)  # a rank's gradient was dense
            else:
                self.sparse[index] = mean
        elif (view := self._slots.fitting_view(index, mean)) is not None:
            view.add_(mean)
        else:
            self._slotless[index] = mean.clone()

    def scale(self, factor: float) -> None:
        if factor == 1.0:
            return
        for memory in self._slots.memories:
            memory.scale(factor)
        for mean in (*self._slotless.values(), *self.sparse.values()):
            mean.mul_(factor)

    def of_used(self, verdict: _core.Verdict) -> Iterator[tuple[int, torch.Tensor]]:
        """By parameter; of sparse ones the values."""
        yield from ((i, self._slots.view(i)) for i in self._slots.plan.parameters if verdict.is_used(i))
        yield from self._slotless.items()
        yield from ((i, mean._values()) for i, mean in self.sparse.items())

    @property
    def are_plain(self) -> bool:
        """Whether they are the buckets as these were reduced: nothing was added, and no slot got back what it held."""
        return not self._kept

    def install(self, verdict: _core.Verdict, factor: float, comm: Communicator) -> None:
        """Gives every parameter that was used on some rank its mean as `.grad`. factor: by which it was scaled."""
        for index, mean in (*self._slotless.items(), *self.sparse.items()):
            grad = placed_like(self._params[index], mean)
            if self._slots.views[index] is not None:
                self._slots.substitute(index, grad)
            else:
                self._params[index].grad = grad
        _core.install_views(self._engine, verdict, self._params, self._slots.grads)
        for index, kept in self._kept.items():
            if not verdict.is_used(index):
                self._slots.view(index).copy_(kept)
        for index, theirs in self._programs.items():
            ours = self._params[index].grad
            if ours is not None and verdict.is_used(index) and ours.shape == theirs.shape:
                theirs.copy_(ours)
                self._params[index].grad = theirs
        if self._own is not None:
            self._give_graph(self._own, verdict, factor, comm)

    def _give_graph(
        self, own: dict[int, torch.Tensor], verdict: _core.Verdict, factor: float, comm: Communicator
    ) -> None:
        """The means become functions of this rank's own gradients, so that a derivative of them can be taken."""
        grads = {index: self._params[index].grad for index in verdict.used()}
        means = {index: grad for index, grad in grads.items() if grad is not None and grad.layout == torch.strided}
        mine = [own.get(index, torch.zeros_like(mean)) for index, mean in means.items()]
        for index, grad in zip(means, with_graph(list(means.values()), mine, factor, comm), strict=True):
            self._params[index].grad = grad
