"""What the ranks' headers say together. They are the same on every rank, so all raise, or go on, alike."""

from collections.abc import Callable

from gpucomm import _core
from gpucomm.errors import StepFailed

# From a rank in the group to what it is called: its rank in the default group.
NameOf = Callable[[int], int]

_MEANING = {
    "iteration": "the number of reductions",
    "layout_hash": "the hash of the bucket plan",
    "backwards": "the number of backwards since the last reduction",
}


def active_ranks(verdict: _core.Verdict) -> list[tuple[int, _core.HeaderWords]]:
    """Those that have not joined, with what they say."""
    return [(rank, words) for rank, words in enumerate(verdict.ranks) if not words.joined]


def check_loops(verdict: _core.Verdict, name_of: NameOf) -> None:
    """Raises StepFailed if the ranks' training loops are not at the same place."""
    everybody, active = list(enumerate(verdict.ranks)), active_ranks(verdict)
    compared = {"iteration": everybody, "layout_hash": everybody, "backwards": active}
    if any(words.weighted for _, words in active):
        del compared["backwards"]  # ranks may split what they have into micro-batches as they like
    for what, ranks in compared.items():
        if len({getattr(words, what) for _, words in ranks}) > 1:
            per_rank = ", ".join(f"{getattr(words, what)} on rank {name_of(r)}" for r, words in ranks)
            raise StepFailed(f"the training loops of the ranks diverged: {_MEANING[what]} is {per_rank}")


def differing_forwards(verdict: _core.Verdict, name_of: NameOf) -> str | None:
    """How many training forwards each rank has run, if they differ and may not."""
    active = active_ranks(verdict)
    if len({words.forwards for _, words in active}) == 1 or any(words.weighted for _, words in active):
        return None
    return ", ".join(f"{words.forwards} on rank {name_of(r)}" for r, words in active)


def mean_factor(verdict: _core.Verdict, of_active: bool, name_of: NameOf) -> float:
    """By what the sum over the ranks, divided by their number, is to be multiplied.

    Where the program gave weights, the mean is the sum divided by all weights together. of_active: ranks that have
    joined do not count. Raises StepFailed if only some ranks gave weights, or they add up to nothing.
    """
    active = active_ranks(verdict)
    without = [name_of(r) for r, words in active if not words.weighted]
    if len(without) == len(active):
        return len(verdict.ranks) / len(active) if of_active and active else 1.0
    if without:
        raise StepFailed(f"rank(s) {without} gave no weight for this iteration while others did")
    total = sum(words.weight for _, words in active)
    if total <= 0:
        raise StepFailed("the weights of all ranks add up to 0 in this iteration: there is no mean over nothing")
    return len(verdict.ranks) / total
