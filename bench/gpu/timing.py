"""Interleaved samples of several arms, and what is said of them."""

import statistics
from collections.abc import Callable, Mapping, Sequence


def interleaved(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """One sample of each arm a round, in alternating order (ABC CBA ...); samples of a round make pairs.

    An arm is a function that takes a sample and returns its value. One more of each, before, is thrown away.
    """
    for sample in arms.values():
        sample()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        names = list(arms) if turn % 2 == 0 else list(reversed(arms))
        for name in names:
            samples[name].append(arms[name]())
    return samples


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else list(values) * 9
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[8], "samples": len(values)}


def paired(
    first: Sequence[float], second: Sequence[float], of: Callable[[float, float], float]
) -> dict[str, float | int]:
    """The spread of a function of two arms' samples, pair by pair."""
    return spread([of(a, b) for a, b in zip(first, second, strict=True)])
