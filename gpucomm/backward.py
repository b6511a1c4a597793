"""Where a backward ends, and how it ends: the callback at its outermost end, and the news that it never came.

Autograd runs a queued callback at the end of the graph task in which it was queued. Inside a reentrant checkpoint that
is an inner one, so the callback is queued from a node of the outer graph that runs after the outermost checkpoint.
"""

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction


class BackwardEnd:
    """Calls `on_end` when the backward is complete; `on_abort` if it dies uncalled, for then backward raised."""

    def __init__(self, on_end: Callable[[], None], on_abort: Callable[[], None]) -> None:
        self._on_end = on_end
        self._on_abort = on_abort
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._on_end()

    def __del__(self) -> None:
        if not self._called and not sys.is_finalizing():
            self._on_abort()


def queue_at_outermost_end(callback: BackwardEnd) -> None:
    """Queues the callback at the end of the outermost backward that is running on this thread.

    Call it from a hook. Raises RuntimeError where autograd would accept the callback and never call it.
    """
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            "a gradient hook ran outside autograd's own backward (compiled autograd?), where its end cannot be seen; "
            "disable compiled autograd for this model"
        )
    node = _outermost_reentrant_node()
    if node is None:
        Variable._execution_engine.queue_callback(callback)
        return
    queued = False

    def queue(*_: object) -> None:
        nonlocal queued
        if not queued:
            queued = True
            Variable._execution_engine.queue_callback(callback)

    for following, _ in node.next_functions:
        if following is not None:
            following.register_prehook(queue)


def _outermost_reentrant_node() -> BackwardCFunction | None:
    """The outermost custom autograd node whose Python backward is running on this thread's stack, if any."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        node = frame.f_locals.get("self") if frame.f_code.co_name == "apply" else None
        if isinstance(node, BackwardCFunction):
            found = node
        frame = frame.f_back
    return found


def starts_on_this_thread() -> bool:
    """Whether the backward whose hook calls this was started on this thread, by the program.

    Autograd carries a backward on to a thread of its own where reentrant checkpoints nest deeply: nothing of the
    program is on such a thread's stack below the hook or the custom node that is running.
    """
    frame: FrameType = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").startswith("gpucomm."):
        return False  # the hook
    return not (frame.f_code.co_name == "apply" and isinstance(frame.f_locals.get("self"), BackwardCFunction))
