"""Which parameters will get no gradient in a backward that has just begun, as far as autograd knows."""

from collections.abc import Iterable

import torch
from torch.autograd.graph import Node, get_gradient_edge


class Forecast:
    """Asks autograd's engine which nodes it will execute: no walk through the graph.

    It tells of the backward that is running, not of those that reentrant checkpoints start inside it: where a gradient
    comes that was not forecast, no more is.
    """

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self._params = params
        self._nodes: dict[int, tuple[torch.nn.Parameter, Node]] = {}
        self._wrong = False

    def absent(self, indices: Iterable[int]) -> list[int]:
        """Those of the parameters that will get none. Call it from a gradient hook."""
        if self._wrong:
            return []
        try:
            return [i for i in indices if not torch._C._will_engine_execute_node(self._node(i))]
        except RuntimeError:
            return []  # not in a plain backward(): the engine does not say

    def note_wrong(self) -> None:
        self._wrong = True

    def _node(self, index: int) -> Node:
        """The one that accumulates the parameter's gradient; kept, so that it stays the same."""
        param = self._params[index]
        known = self._nodes.get(index)
        if known is None or known[0] is not param:
            with torch.enable_grad():
                known = self._nodes[index] = (param, get_gradient_edge(param).node)
        return known[1]
