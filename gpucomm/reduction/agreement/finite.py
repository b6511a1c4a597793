"""Gradients that are infinite or not numbers: passed on, or an error that names the first, or an iteration skipped.

Each rank looks at its own gradients as they are packed and tells in the header. Where all were finite and the mean is
not, the sum did not fit its type.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from gpucomm import _core, cuda
from gpucomm.errors import NonFinite
from gpucomm.reduction.agreement.verdict import NameOf


class FiniteCheck:
    """policy: "pass" looks at nothing; "raise": NonFinite on every rank; "skip": every rank's optimizers leave the
    parameters alone in this iteration."""

    def __init__(self, policy: str, names: Sequence[str], engine: _core.Engine) -> None:
        self.policy = policy
        self.skipping = False
        self._skipped: dict[torch.nn.Parameter, torch.Tensor] = {}  # what they had as `.grad` then
        self._looked = False  # whether what is skipped was looked at again
        self.skipped = 0  # iterations so far
        self._names = names
        self._engine = engine
        engine.set_check_finite(policy != "pass")

    def judge(
        self,
        verdict: _core.Verdict,
        means: Iterator[tuple[int, torch.Tensor]],
        name_of: NameOf,
        first_of: Callable[[int], int] | None = None,
    ) -> None:
        """means: reduced gradients by parameter. Raises NonFinite, or has them skipped.

        first_of: where they may differ between ranks; collective, from what this rank found to the first of all.
        """
        if self.policy == "pass":
            return
        self.skipping = False
        guilty = [(rank, words.nonfinite) for rank, words in enumerate(verdict.ranks) if words.nonfinite >= 0]
        if guilty:
            parameter, ranks = guilty[0][1], [name_of(r) for r, _ in guilty]
            where, what = f"on rank {ranks[0]}", "is not finite"
        elif (overflown := self._first_overflown(means, first_of)) >= 0:
            parameter, ranks = overflown, []
            where, what = "of the ranks together", "is not finite although what each rank packed is"
        else:
            return
        iteration = self._engine.iteration
        if self.policy == "raise":
            name = self._names[parameter]
            raise NonFinite(
                f"iteration {iteration}: the gradient of parameter '{name}' {where} {what}", ranks, name, iteration
            )
        self.skipping = True
        self.skipped += 1

    def note_installed(self, params: Sequence[torch.nn.Parameter]) -> None:
        """The iteration's gradients are where the program finds them. Held until forget()."""
        self._skipped = {param: param.grad for param in params if param.grad is not None} if self.skipping else {}
        # A communication hook may have given the infinity to another rank only: then it is not to be seen here.
        self._looked = self._are_finite()

    def forget(self) -> None:
        """Whatever is in `.grad` belongs to a new iteration."""
        self._skipped = {}

    def take_skipped(self, params: Sequence[torch.nn.Parameter]) -> None:
        """An optimizer is about to step these: takes the gradients of the skipped iteration away, no others."""
        if not self._looked:
            self._look()
        for param in params:
            if self.skipping and param.grad is not None and param.grad is self._skipped.get(param):
                param.grad = None

    def note_local(self) -> None:
        """A backward begins that is not reduced, and adds to what is there: only what still holds an infinity or NaN is
        skipped."""
        if self.skipping:
            self._look()

    def _look(self) -> None:
        self._looked = True
        self.skipping = not self._are_finite()

    def _are_finite(self) -> bool:
        return all(_is_finite(grad) for param, grad in self._skipped.items() if param.grad is grad)

    def _first_overflown(self, means: Iterator[tuple[int, torch.Tensor]], first_of: Callable[[int], int] | None) -> int:
        """The parameter, or -1."""
        found = next((i for i, mean in means if not _mean_is_finite(mean)), -1)
        return found if first_of is None else first_of(found)


def _is_finite(grad: torch.Tensor) -> bool:
    values = grad._values() if grad.layout == torch.sparse_coo else grad
    return bool(values.isfinite().all())


def _mean_is_finite(mean: torch.Tensor) -> bool:
    """Of one on a GPU the host waits for the answer."""
    return bool(mean.isfinite().all()) if cuda.gpu.serves(mean.device) else _core.first_nonfinite(mean) < 0
