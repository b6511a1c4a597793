"""The trace as Python sees it: one event for each ready, pack, reduce, wait and header of the latest iterations."""

from typing import NamedTuple

from gpucomm import _core


class TraceEvent(NamedTuple):
    """kind: "ready", "pack", "reduce", "unpack", "step", "wait" or "header".

    id: index of the parameter (ready, pack) or bucket (reduce, wait), -1 for the whole iteration. begin_ns, end_ns:
    CLOCK_MONOTONIC, so comparable between processes of a host. iteration: low 16 bits.
    """

    kind: str
    id: int
    begin_ns: int
    end_ns: int
    nbytes: int
    iteration: int


def read_trace(trace: _core.Trace, iteration: int = -1) -> list[TraceEvent]:
    """Oldest first; as many as the ring holds. iteration: only the events of this one."""
    return [TraceEvent(*event) for event in trace.events(iteration)]
