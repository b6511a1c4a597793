"""The program: checks everything before anything is written, then starts the ranks, or is one of them."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed
from torch.distributed.elastic.multiprocessing.api import SignalException

from gpucomm import CommError, CommTimeout, PeerFailed
from gpucomm.examples.train_lm import launch
from gpucomm.examples.train_lm.compare import compare
from gpucomm.examples.train_lm.errors import JobError
from gpucomm.examples.train_lm.memory import check_fits
from gpucomm.examples.train_lm.options import Settings, parse
from gpucomm.examples.train_lm.run_folder import check_free, check_resumable, create
from gpucomm.examples.train_lm.text import Text, read_text
from gpucomm.examples.train_lm.train import say, train, use_cores


def main(argv: list[str]) -> int:
    """The exit status. What the user can put right is one line on stderr, from one process."""
    is_rank = launch.is_rank()
    try:
        if is_rank:
            with launch.interruptible():
                be_rank(argv)
        else:
            start(argv)
    except (JobError, CommError) as error:
        if not is_rank or speaks_for(error):
            print(f"train_lm: {error}", file=sys.stderr)
        return launch.TOLD if is_rank else 1
    except OSError as error:  # this rank alone, while running: a full disk
        print(f"train_lm: {error}", file=sys.stderr)
        return launch.TOLD if is_rank else 1
    except SignalException as end:
        print(f"train_lm: ended by {end.sigval.name}", file=sys.stderr)
        return 128 + end.sigval
    except KeyboardInterrupt:  # before the ranks are started; in a rank, the launcher is the one to tell
        if not is_rank:
            print(f"train_lm: ended by {signal.SIGINT.name}", file=sys.stderr)
        return launch.INTERRUPTED
    return 0


def speaks_for(error: Exception) -> bool:
    """Whether this rank is the one to tell: the first of those that can, since each of them has found the same."""
    gone: set[int] = set()
    if isinstance(error, PeerFailed):
        gone = {error.rank}
    elif isinstance(error, CommTimeout):
        gone = set(error.missing)
    return int(os.environ["RANK"]) == min(set(range(int(os.environ["WORLD_SIZE"]))) - gone)


def start(argv: list[str]) -> None:
    """The user's process: checks, then starts the ranks and waits for them."""
    settings, text = checked(argv)
    check_fits(settings, text.byte_count)
    arguments = argv if settings.resume else [*argv, "--out", settings.out]
    launch.start_ranks(settings.nproc, arguments)


def be_rank(argv: list[str]) -> None:
    """A rank, started by us or by torchrun."""
    settings, text = checked(argv, world_size=int(os.environ["WORLD_SIZE"]))
    use_cores(int(os.environ.get("LOCAL_WORLD_SIZE", settings.nproc)))
    if os.environ["RANK"] == "0" and not settings.resume:
        create(settings)
    torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    out = [settings.out]  # by default it has the time in its name: rank 0's counts
    torch.distributed.broadcast_object_list(out)
    settings = replace(settings, out=out[0])
    say(
        f"{settings.preset} GPT, {settings.nproc} ranks, {settings.steps} steps, {text.byte_count} bytes of text, "
        f"run folder {settings.out}"
    )
    (compare if settings.compare else train)(settings, text)
    torch.distributed.destroy_process_group()  # after an error it could wait for peers in vain; exiting is enough


def checked(argv: list[str], world_size: int | None = None) -> tuple[Settings, Text]:
    """The settings and the text; raises JobError for whatever can be known to be wrong beforehand."""
    settings = parse(argv, world_size)
    text = read_text(settings.data, settings.block_size)
    if settings.resume:
        check_resumable(settings, text)
    elif world_size is None:  # rank 0 checks when it creates it, and the others might be later than that
        check_free(settings)
    return replace(settings, text_digest=text.digest), text


def leave(status: int) -> NoReturn:
    """Exits; after a signal without the interpreter's tear-down, of which torch makes more than a second."""
    if status > 128:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
