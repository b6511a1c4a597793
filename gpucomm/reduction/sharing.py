"""The reducers of the process among themselves: who reduces a shared parameter."""

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucomm.reduction.reducer import Reducer

_live: "weakref.WeakSet[Reducer]" = weakref.WeakSet()


def enlist(reducer: "Reducer") -> None:
    """Counts it among the reducers of the process for as long as it lives."""
    _live.add(reducer)


def claim(reducer: "Reducer") -> None:
    """Makes this the only active one among those that share parameters: the wrapper that ran the last forward."""
    mine = set(map(id, reducer.params))
    for other in _live:
        if other is not reducer and any(id(p) in mine for p in other.params):
            other.active = False
            other.orphans = frozenset(i for i, p in enumerate(other.params) if id(p) not in mine)
    reducer.active = True
    reducer.orphans = frozenset()


def retire(reducer: "Reducer") -> None:
    """Counts it no longer: it reduces nothing, and no optimizer is refused on its account."""
    reducer.active = False
    _live.discard(reducer)


def live_reducers() -> list["Reducer"]:
    """Those that count."""
    return list(_live)
