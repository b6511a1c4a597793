"""What a wrapper's trace says of one iteration: when gradients were ready, when buckets were on their way.

A bucket is on its way from the launch by the last rank (before that its reduction has nothing to work on) to its
completion as this rank saw it, which looks whenever a bucket is launched and at the end of backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gpucomm.trace import TraceEvent


@dataclass(frozen=True)
class Timeline:
    """One rank's iteration, in ns of CLOCK_MONOTONIC.

    backward: first gradient ready, last one packed; reduces: by bucket, its launch, and when it was seen complete.
    """

    backward: tuple[int, int]
    reduces: tuple[tuple[int, int], ...]

    @classmethod
    def latest(cls, events: Sequence[TraceEvent]) -> "Timeline":
        """Of the last complete iteration in a trace that holds all of it."""
        packs = _latest(events, "pack")
        return cls(
            (min(event.begin_ns for event in packs), max(event.end_ns for event in packs)),
            tuple((event.begin_ns, event.end_ns) for event in _latest(events, "reduce")),
        )

    def to_tensor(self) -> torch.Tensor:
        """int64 [1 + buckets, 2]: backward, then each bucket."""
        return torch.tensor([self.backward, *self.reduces])

    @classmethod
    def from_tensor(cls, rows: torch.Tensor) -> "Timeline":
        backward, *reduces = map(tuple, rows.tolist())
        return cls(backward, tuple(reduces))


def bucket_nbytes(events: Sequence[TraceEvent]) -> list[int]:
    """The size of each bucket of the last complete iteration, in plan order."""
    return [event.nbytes for event in _latest(events, "reduce")]


def _latest(events: Sequence[TraceEvent], kind: str) -> list[TraceEvent]:
    """The last complete iteration's events of a kind, by id."""
    iteration = next(event.iteration for event in reversed(events) if event.kind == "header")
    found = [event for event in events if (event.iteration, event.kind) == (iteration, kind)]
    return sorted(found, key=lambda event: event.id)


def overlap_ns(ranks: Sequence[Timeline], rank: int) -> int:
    """How long a bucket was on its way while this rank's backward ran."""
    begin, end = ranks[rank].backward
    running = zip(*(timeline.reduces for timeline in ranks), strict=True)
    spans = [(max(begin, *(launch for launch, _ in bucket)), min(end, bucket[rank][1])) for bucket in running]
    return union_ns(spans)


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """The time that lies in at least one of the spans; a span that ends before it begins is empty."""
    total, covered = 0, -(1 << 62)
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, covered))
        covered = max(covered, end)
    return total
