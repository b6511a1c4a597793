"""One process per rank, and an end for all of them: through torch's own elastic launcher, as torchrun does it.

Ctrl-C reaches the launcher, which passes it on to the ranks. A rank notices it between two Python instructions; one
that is deep in a wait of the communication library does not, so a thread ends it GRACE_S later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpucomm.examples.train_lm.errors import JobError
from gpucomm.launch import one_host

GRACE_S = 1.5
INTERRUPTED = 128 + signal.SIGINT
TOLD = 3  # exit status of a rank whose failure is already on stderr
# Importing takes seconds: Ctrl-C in that time ends the rank by the signal, without a traceback.
_RANK_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from gpucomm.examples.train_lm.__main__ import leave, main
leave(main(sys.argv[1:]))
"""


def is_rank() -> bool:
    """Whether a launcher, ours or torchrun, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(count: int, arguments: Sequence[str]) -> None:
    """Runs this program again as `count` ranks, and waits for them.

    Raises JobError if one fails, and SignalException if a signal ended the run (all ranks are gone then).
    """
    logging.disable(logging.CRITICAL)  # the launcher's news reaches the user through us, in one line
    with tempfile.TemporaryDirectory() as folder:
        _run(one_host(count, folder), arguments)


def _run(config: LaunchConfig, arguments: Sequence[str]) -> None:
    try:
        elastic_launch(config, sys.executable)("-c", _RANK_PROGRAM, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == TOLD:
            raise SystemExit(1) from None
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise JobError(f"rank {rank} was ended by {name}, so the run stopped") from None
        raise JobError(f"rank {rank} failed with exit status {failure.exitcode}, so the run stopped") from None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In a rank: SIGINT raises KeyboardInterrupt, and ends the process after GRACE_S at the latest."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # written by the C handler, whatever Python is doing
    interrupted = False

    # Both say so, for either can be the first: the thread while a library call goes on, the handler on a busy machine.
    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def watch() -> None:
        nonlocal interrupted
        while os.read(read_end, 1) != bytes([signal.SIGINT]):
            pass
        interrupted = True
        time.sleep(GRACE_S)
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    try:
        yield
    except Exception:
        # In the midst of a library call the interrupt can come out as something else, and so does a peer's.
        if interrupted:
            raise KeyboardInterrupt from None
        raise
