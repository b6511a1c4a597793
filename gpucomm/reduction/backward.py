"""Where a backward ends, and how it ends: the callback at its outermost end, and the news that it never came.

Autograd runs a queued callback at the end of the graph task in which it was queued. Inside a reentrant checkpoint that
is an inner one, so the callback is queued from a node of the outer graph that runs after the outermost checkpoint.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType, TracebackType

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from gpucomm.errors import text_of

# For the text of an exception among all objects of the process.
_LONGEST_SEARCH_S = 2.0


class BackwardEnd:
    """Calls `on_end` when the backward is complete; `on_abort` if it dies uncalled, for then backward raised.

    on_abort is given a function that finds the exception's type and text, empty if they are not known; it is slow.
    """

    def __init__(self, on_end: Callable[[], None], on_abort: Callable[[Callable[[], str]], None]) -> None:
        self._on_end = on_end
        self._on_abort = on_abort
        self._called = False

    def __call__(self) -> None:
        if not self._called:
            self._called = True
            self._on_end()

    def abort(self, caller: FrameType | None = None) -> None:
        """The backward that caller started raised; does nothing if that was known, or if it came to its end."""
        if not self._called:
            self._called = True
            self._on_abort(lambda: _text_of_error_below(caller))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.abort(sys._getframe().f_back)


class _InnerEnd:
    """In the callbacks of an inner backward: if it dies uncalled, the inner one raised and the outer one does too."""

    def __init__(self, outermost: BackwardEnd) -> None:
        self._outermost: BackwardEnd | None = outermost

    def __call__(self) -> None:
        self._outermost = None

    def __del__(self) -> None:
        if self._outermost is not None and not sys.is_finalizing():
            self._outermost.abort(sys._getframe().f_back)


def _text_of_error_below(caller: FrameType | None) -> str:
    """Of the exception with which a backward ends, while autograd holds it and has not given it back to `caller`.

    Nothing in Python leads to it then, so it is looked for among all objects: the one exception that no object refers
    to, with a traceback that leads to the caller (until Python 3.11 autograd holds that beside it). One that was
    caught and kept is referred to; where autograd itself raises there is none. Peers wait meanwhile, so the search is
    given up after a while.
    """
    give_up = time.monotonic() + _LONGEST_SEARCH_S
    found: list[BaseException] = []
    traces: list[TracebackType] = []
    for candidate in gc.get_objects():
        # Not isinstance: it asks objects for their __class__, which may be code of theirs.
        if issubclass(type(candidate), BaseException):
            if candidate.__traceback__ is None or _is_below(candidate.__traceback__, caller):
                found.append(candidate)
        elif type(candidate) is TracebackType and _is_below(candidate, caller):
            traces.append(candidate)
    del candidate
    known = (found, traces, sys._getframe())

    def is_orphan(thing: object) -> bool:
        return time.monotonic() < give_up and all(
            any(referrer is k for k in known) for referrer in gc.get_referrers(thing)
        )

    errors = [error for error in found if is_orphan(error)]
    orphans = [trace for trace in traces if is_orphan(trace)]
    if len(errors) == 1 and (errors[0].__traceback__ is not None or orphans):
        return text_of(errors[0])
    if len(orphans) == 1:  # the exception is not made yet, as Python until 3.11 does for errors of its own
        trace = orphans[0]
        while trace.tb_next is not None:
            trace = trace.tb_next
        code = trace.tb_frame.f_code
        return f"raised in backward, in {code.co_name} ({code.co_filename}:{trace.tb_lineno})"
    return ""


def _is_below(trace: TracebackType, caller: FrameType | None) -> bool:
    frame: FrameType | None = trace.tb_frame
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


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
    # The node keeps the callback for as long as the program keeps the graph, so its death would tell of a raise late.
    Variable._execution_engine.queue_callback(_InnerEnd(callback))
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


class OneBackward:
    """Tells a backward that autograd carries on to another thread from a second one that runs at the same time."""

    def __init__(self) -> None:
        self._started_on: int | None = None  # the thread whose program called backward, as far as seen
        self._arming = False

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Around what the first gradient's hook does. Raises TwoBackwards if another thread's is at it."""
        if self._arming:
            raise TwoBackwards  # this one lost the interpreter to another thread meanwhile
        self._arming = True
        try:
            yield
        finally:
            self._arming = False

    def note_thread(self) -> None:
        """The backward that begins runs on this thread."""
        self._started_on = get_ident() if starts_on_this_thread() else None

    def check_thread(self) -> None:
        """A gradient came on another thread than those before it. Raises TwoBackwards if it is of another backward."""
        if not starts_on_this_thread():
            return
        if self._started_on is None:
            self._started_on = get_ident()
        elif self._started_on != get_ident():
            raise TwoBackwards

    def was_started_here(self) -> bool:
        """Whether this thread's program called the backward that is under way."""
        return self._started_on == get_ident()


class TwoBackwards(RuntimeError):
    """Two backwards at once, on two threads, through one wrapper."""

    def __init__(self) -> None:
        super().__init__(
            "two backwards at once, on two threads, through one DistributedDataParallel: their gradients cannot be "
            "told apart. Run one after the other, or wrap a copy of the module for each thread"
        )
