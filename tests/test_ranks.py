"""The harness that the other tests stand on."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from footprint import footprint
from ranks import RanksFailed, run_ranks


def test_values_come_back_in_rank_order():
    def body(rank, world, offset):
        return {"rank": rank, "world": world, "x": torch.full((3,), rank + offset)}

    results = run_ranks(body, 3, 0.5, init=False)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["world"] == 3 for result in results)
    assert torch.equal(results[2]["x"], torch.full((3,), 2.5))


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_the_process_group_exists(nprocs):
    def body(rank, world):
        x = torch.tensor([float(rank + 1)])
        dist.all_reduce(x)
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), x.item()

    total = nprocs * (nprocs + 1) / 2
    assert run_ranks(body, nprocs) == [(rank, nprocs, "gloo", total) for rank in range(nprocs)]


def test_without_init_a_rank_can_make_the_group_itself():
    def body(rank, world):
        was = dist.is_initialized()
        dist.init_process_group("gloo")
        dist.barrier()
        return was, dist.get_rank()

    assert run_ranks(body, 2, init=False) == [(False, 0), (False, 1)]


def test_ranks_run_on_one_thread_with_torchruns_environment():
    def body(rank, world):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
        return torch.get_num_threads(), [os.environ[name] for name in names]

    for rank, result in enumerate(run_ranks(body, 2)):
        assert result == (1, [str(rank), str(rank), "2", "2", "1", "127.0.0.1"])


def test_an_exception_raises_with_every_ranks_traceback_and_output():
    def body(rank, world):
        print(f"words of rank {rank}")
        if rank != 1:
            raise ValueError(f"bad value on {rank}")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(body, 3, init=False)
    text = str(caught.value)
    assert "2 of 3 ranks failed" in text
    for part in ("ValueError: bad value on 0", "ValueError: bad value on 2", "words of rank 0", "in body"):
        assert part in text
    assert "rank 1" not in text


def test_a_value_that_cannot_be_pickled_is_that_ranks_error():
    def body(rank, world):
        return threading.Lock() if rank == 1 else None

    with pytest.raises(RanksFailed, match="rank 1 raised"):
        run_ranks(body, 2, init=False)


def test_a_large_value_comes_back_whole():
    (x,) = run_ranks(lambda rank, world: torch.arange(1_000_000), 1, init=False)
    assert torch.equal(x, torch.arange(1_000_000))


def test_a_hung_rank_is_named_with_its_stack_and_killed():
    def body(rank, world):
        if rank == 1:
            a_place_to_hang()
        return os.getpid()

    def a_place_to_hang():
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(body, 3, init=False, timeout_s=0.5)
    assert time.monotonic() - started < 10
    assert "hung: [1]" in str(caught.value)
    assert "a_place_to_hang" in str(caught.value)


def test_a_stopped_rank_is_killed_at_the_timeout():
    def body(rank, world):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    stopped, other = run_ranks(body, 2, init=False, timeout_s=0.5, expect_failures=True)
    assert stopped.hung
    assert stopped.exitcode == -signal.SIGKILL
    assert other.exitcode == 0


def test_outcomes_tell_values_errors_and_deaths_apart():
    class Broken(Exception):
        def __init__(self, culprit):
            super().__init__(f"culprit {culprit}")
            self.culprit = culprit

    def body(rank, world):
        if rank == 0:
            return "fine"
        if rank == 1:
            raise Broken(7)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    fine, raised, killed, left = run_ranks(body, 4, init=False, expect_failures=True)
    assert (fine.value, fine.error_type, fine.exitcode) == ("fine", None, 0)
    assert (raised.error_type, raised.error_attributes, raised.exitcode) == ("Broken", {"culprit": 7}, 1)
    assert "culprit 7" in raised.error_text
    assert (killed.exitcode, killed.reported) == (-signal.SIGKILL, False)
    assert (left.exitcode, left.reported) == (3, False)
    assert not any(outcome.hung for outcome in (fine, raised, killed, left))


def test_a_death_of_rank_0_leaves_the_others_a_store():
    def body(rank, world):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        store = dist.distributed_c10d._get_default_store()
        time.sleep(0.2)
        store.set("after", "value")
        return store.get("after")

    dead, other = run_ranks(body, 2, expect_failures=True)
    assert dead.exitcode == -signal.SIGKILL
    assert other.value == b"value", other.complaint()


def test_a_rank_that_is_done_waits_for_its_peers():
    def body(rank, world):
        peers = [None] * world
        dist.all_gather_object(peers, os.getpid())
        if rank == 1:
            time.sleep(0.3)
            return Path(f"/proc/{peers[0]}/stat").read_text().split(")")[-1].split()[0]
        return None

    assert run_ranks(body, 2)[1] in "SR"


def test_a_keyboard_interrupt_is_an_outcome():
    def body(rank, world):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(30)

    (outcome,) = run_ranks(body, 1, init=False, expect_failures=True)
    assert outcome.error_type == "KeyboardInterrupt"
    assert outcome.seconds < 10


def test_nothing_is_left_behind():
    def body(rank, world):
        started = subprocess.Popen(["sleep", "60"])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return started.pid

    run_ranks(lambda rank, world: None, 2)  # what torch makes once for the process
    before = footprint()
    outcomes = run_ranks(body, 3, expect_failures=True)
    assert footprint().grown_since(before) == ""
    for outcome in (outcomes[0], outcomes[2]):
        deadline = time.monotonic() + 5  # orphans are reaped by init
        while Path(f"/proc/{outcome.value}/cmdline").exists() and time.monotonic() < deadline:
            if not Path(f"/proc/{outcome.value}/cmdline").read_bytes():
                break
            time.sleep(0.01)
        else:
            assert not Path(f"/proc/{outcome.value}").exists()


def test_ranks_die_with_the_process_that_forked_them():
    script = (
        "import os, time\n"
        "from ranks import run_ranks\n"
        "def body(rank, world):\n"
        "    os.write(3, f'{os.getpid()} '.encode())\n"
        "    time.sleep(60)\n"
        "run_ranks(body, 2, init=False)\n"
    )
    read_end, write_end = os.pipe()

    def pipe_as_3():
        os.dup2(write_end, 3)

    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, preexec_fn=pipe_as_3, pass_fds=(3, write_end)
    )
    os.close(write_end)
    text = b""
    while len(text.split()) < 2 or not text.endswith(b" "):
        chunk = os.read(read_end, 100)
        assert chunk, "the ranks did not start"
        text += chunk
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while os.read(read_end, 100):  # end of file once no rank holds the pipe
        assert time.monotonic() < deadline
    os.close(read_end)


def test_a_footprint_sees_files_memfds_mappings_threads_and_children():
    before = footprint()
    fd = os.memfd_create("seen_by_the_test")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    child = subprocess.Popen(["sleep", "60"])
    try:
        grown = footprint().grown_since(before)
    finally:
        stop.set()
        thread.join()
        child.kill()
        child.wait()
        os.close(fd)
    for part in ("file descriptor", "seen_by_the_test", "1 more threads", str(child.pid)):
        assert part in grown
    assert footprint().grown_since(before) == ""
