"""Parts for test_gpu_check.py, each of which ends in its own way: by the name of its folder."""

import os
import signal
import time

from gpu.parts import NotRun


def run(place, report):
    report.facts(seen=place.folder.name)
    report.row("first", 1.5, made_of=[1, 2])
    ENDS[place.folder.name](place)
    report.row("second", True)


def raises(place):
    raise ArithmeticError("as it is meant to")


def hangs(place):
    time.sleep(1000)


def leaves_a_child_that_hangs(place):
    if os.fork() == 0:
        time.sleep(1000)
    (place.folder.parent / "left").write_text(str(os.getpgid(0)))


def dies(place):
    os.kill(os.getpid(), signal.SIGSEGV)


def is_not_for_here(place):
    raise NotRun("there is no such thing")


def one_rank_raises(place):
    if place.rank == 1:
        raise ArithmeticError("as it is meant to")
    time.sleep(1000)


def one_rank_is_killed(place):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def nobody_is_killed(place):
    pass


def works(place):
    pass


ENDS = {
    end.__name__: end
    for end in (
        raises,
        hangs,
        leaves_a_child_that_hangs,
        dies,
        is_not_for_here,
        one_rank_raises,
        one_rank_is_killed,
        nobody_is_killed,
        works,
    )
}
