"""Slots whose parameter got no gradient in a backward: completed, so that no bucket, and no peer, waits for them."""

import torch

from gpucomm import _core
from gpucomm.reduction.forecast import Forecast
from gpucomm.reduction.hooks import Hooks
from gpucomm.reduction.layout.local import local_grad
from gpucomm.reduction.layout.slots import Slots
from gpucomm.reduction.second_round import SecondRound
from gpucomm.reduction.unpack import Means
from gpucomm.reduction.usage import Usage


class Completion:
    """Packs what `.grad` holds of parameters that get no gradient (accumulated under no_sync), else zeros."""

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        engine: _core.Engine,
        slots: Slots,
        hooks: Hooks,
        usage: Usage,
        means: Means,
        second_round: SecondRound,
    ) -> None:
        self._params = params
        self._engine = engine
        self._slots = slots
        self._hooks = hooks
        self._usage = usage
        self._means = means
        self._second_round = second_round
        self._forecast = Forecast(params)
        self._absent: list[int] = []  # forecast to get none in this backward
        self._aside: dict[int, torch.Tensor] = {}  # what `.grad` of those held, which is in their slots already

    def complete_absent(self, may_be_wrong: bool) -> None:
        """When backward begins: slots that will get none do not keep those behind them waiting.

        may_be_wrong: a gradient that comes all the same can still be reduced.
        """
        self._absent = []
        if self._usage.is_worth_forecasting and may_be_wrong:
            self._absent = self._forecast.absent(self._slots.expected())
            for index in self._absent:
                self._complete(index)
                # A gradient that comes all the same is reduced by itself: not on top of what was packed here.
                if (grad := self._params[index].grad) is not None:
                    self._aside[index] = grad
                    self._params[index].grad = None

    def _put_back(self) -> None:
        for index, grad in self._aside.items():
            if self._params[index].grad is None:
                self._params[index].grad = grad
        self._aside.clear()

    def note_late(self, index: int) -> None:
        """A gradient came for a slot that was packed already."""
        if not self._engine.used(index):
            self._forecast.note_wrong()

    def complete_missing(self) -> None:
        """When backward ends: all that is left."""
        self._put_back()
        with self._usage.search_range():
            missing = self._find_missing()
        for index in missing:
            self._complete(index)
        for index in (*missing, *self._slots.slotless):
            grad = local_grad(self._params[index])
            if grad is not None and self._engine.used(index) and self._slots.fitting_view(index, grad) is None:
                # Accumulated under no_sync, or left to hooks of the program, and does not fit.
                self._second_round.add(index, self._means.note_own(index, grad))
                self._params[index].grad = None

    def complete_with_zeros(self) -> None:
        """All that is left, of a rank that only keeps its peers company."""
        self._put_back()
        for index in self._engine.missing():
            self._engine.complete(index, None)

    def _find_missing(self) -> list[int]:
        missing = self._engine.missing()
        if not all(map(self._hooks.is_attached, missing)):
            detached = [index for index in missing if not self._hooks.is_attached(index)]
            self._hooks.attach_all()
            for index in detached:
                if self._params[index].grad is not None:
                    self._hooks.call(index)
            missing = self._engine.missing()
        self._usage.note_here(sorted(missing + self._absent))
        return missing

    def _complete(self, index: int) -> None:
        grad = local_grad(self._params[index])
        view = self._slots.fitting_view(index, grad) if grad is not None else None
        if grad is None or view is None:
            self._engine.complete(index, None)
            return
        grad = self._means.note_own(index, grad)
        if grad.data_ptr() == view.data_ptr():
            self._means.keep(index, grad)
        else:
            view.copy_(grad)
        self._engine.complete(index, view)
