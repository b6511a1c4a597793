"""launch: results, errors, signals, and what is left behind. Ranks are forked from pytest, which has one thread."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from commands import environment, run_python

import gpucomm

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Unpicklable(Exception):
    def __init__(self, number, word):
        super().__init__(f"{number} {word}")


def raising_on(rank, error):
    """A function whose ranks wait for each other in vain, as one raises."""

    def body():
        if dist.get_rank() == rank:
            raise error
        gpucomm.Communicator().barrier()

    return body


# ---- results


def test_rank_0s_result_comes_back_and_arguments_go_there():
    def body(word, numbers):
        return word, [dist.get_rank(), dist.get_world_size(), *numbers]

    assert gpucomm.launch(body, "$local_rank", [7], nprocs=2) == ("$local_rank", [0, 2, 7])


def test_ranks_train_together():
    def body():
        model = gpucomm.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        return model.transport, model.module.weight.grad

    transport, grad = gpucomm.launch(body, nprocs=3)
    assert transport == "shm"
    assert grad.item() == 2.0


def test_a_rank_that_is_done_early_waits_for_the_others():
    def body():
        comm = gpucomm.Communicator(transport="c10d")
        if dist.get_rank() == 1:
            time.sleep(0.3)
        comm.all_reduce(torch.ones(3))

    assert gpucomm.launch(body, nprocs=2) is None


def test_fn_may_destroy_the_group_itself():
    assert gpucomm.launch(lambda: dist.destroy_process_group(), nprocs=2) is None


def test_launching_from_another_thread_works():
    results = []
    thread = threading.Thread(target=lambda: results.append(gpucomm.launch(dist.get_world_size, nprocs=2)))
    thread.start()
    thread.join()
    assert results == [2]


def test_forked_ranks_compute_where_this_process_has_a_pool_of_threads(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, gpucomm\n"
        "torch.set_num_threads(2)\n"
        "x = torch.ones(700, 700)\n"
        "x @ x, x.exp()\n"  # starts the pool
        "def body():\n"
        "    weight = torch.ones(700, 700, requires_grad=True)\n"
        "    (x @ weight).mul(2).sum().backward()\n"
        "    return weight.grad[0, 0].item(), torch.get_num_threads()\n"
        "print(gpucomm.launch(body, nprocs=2), torch.get_num_threads())\n"
    )
    ran = run_python(script, cwd=tmp_path, env=environment(OMP_NUM_THREADS="2"))
    assert ran.stdout == "(1400.0, 1) 2\n", ran.stderr


# ---- errors


def test_an_error_is_raised_as_itself_with_its_traceback():
    with pytest.raises(ArithmeticError, match=r"^of rank 1$") as caught:
        gpucomm.launch(raising_on(1, ArithmeticError("of rank 1")), nprocs=2)
    text = str(caught.value.__cause__)
    assert re.search(r"rank 1\nTraceback.*in body\n *raise error\n.*ArithmeticError: of rank 1", text, re.DOTALL)


def test_an_error_that_cannot_be_pickled_is_told_by_type_and_text():
    with pytest.raises(RuntimeError, match=r"^rank 0 raised Unpicklable: 3 x$") as caught:
        gpucomm.launch(raising_on(0, Unpicklable(3, "x")), nprocs=2)
    assert "in body" in str(caught.value.__cause__)


def test_the_cause_is_raised_and_not_what_peers_say_of_it():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("in backward")

    def body():
        model = gpucomm.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        try:
            (Failing.apply(loss) if dist.get_rank() == 1 else loss).backward()
        except ArithmeticError:
            time.sleep(0.3)  # its peer has raised StepFailed by now
            raise

    with pytest.raises(ArithmeticError, match="in backward"):
        gpucomm.launch(body, nprocs=2)


def test_a_killed_rank_is_a_peer_failure():
    def body():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(gpucomm.PeerFailed, match=r"rank 1 was ended by SIGKILL") as caught:
        gpucomm.launch(body, nprocs=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize("code", [3, "text"])
def test_an_exit_status_is_raised(code):
    with pytest.raises(SystemExit) as caught:
        gpucomm.launch(lambda: sys.exit(code), nprocs=2)
    assert caught.value.code == code


def test_leaving_with_status_0_is_no_result():
    with pytest.raises(RuntimeError, match="left by exit status 0"):
        gpucomm.launch(lambda: sys.exit(), nprocs=2)


def test_a_result_that_cannot_be_pickled_is_a_type_error():
    with pytest.raises(TypeError, match="result of rank 0, a lock, cannot be pickled"):
        gpucomm.launch(threading.Lock, nprocs=2)


@pytest.mark.parametrize("nprocs", [0, -1, 1.0, "2", True])
def test_a_wrong_number_of_ranks_is_refused(nprocs):
    with pytest.raises(ValueError, match=re.escape(f"nprocs is {nprocs!r}")):
        gpucomm.launch(dist.get_rank, nprocs=nprocs)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a rank for each device")
def test_without_devices_the_number_of_ranks_is_asked_for():
    with pytest.raises(ValueError, match="nprocs is None and this machine has no CUDA device"):
        gpucomm.launch(dist.get_rank)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="fn is 3, accepted is a function"):
        gpucomm.launch(3, nprocs=2)


def test_a_rank_launches_no_ranks():
    with pytest.raises(RuntimeError, match="this process is a rank already"):
        gpucomm.launch(lambda: gpucomm.launch(dist.get_rank, nprocs=2), nprocs=1)


def test_a_process_with_a_group_launches_no_ranks(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this process has a process group"):
            gpucomm.launch(dist.get_rank, nprocs=2)
    finally:
        dist.destroy_process_group()


def test_traceback_texts_are_pickled_as_they_are():
    error = gpucomm.launched.RankTraceback("text")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# ---- signals and surroundings


def test_handlers_loggers_and_environment_are_as_before():
    import logging

    def state():
        loggers = {name: logging.getLogger(name).disabled for name in list(logging.root.manager.loggerDict)}
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], loggers, dict(os.environ)

    before = state()
    with pytest.raises(ArithmeticError):
        gpucomm.launch(raising_on(0, ArithmeticError()), nprocs=2)
    handlers, loggers, environment = state()
    assert handlers == before[0]
    assert {name: loggers[name] for name in before[1]} == before[1]
    assert environment == before[2]


# Where the ranks are when Ctrl-C comes: in Python, in a wait of ours, in one of gloo.
PLACES = {
    "sleep": "time.sleep(100)",
    "ours": "wait_for_peer(gpucomm.Communicator())",
    "gloo": "wait_for_peer(dist)",
}


@pytest.mark.parametrize(
    ("place", "whom"),
    [
        ("sleep", "the launching process"),
        ("ours", "the launching process"),
        ("gloo", "the launching process"),
        ("gloo", "all"),
    ],
)
def test_ctrl_c_is_a_keyboard_interrupt_and_no_rank_is_left(place, whom, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist, gpucomm\n"
        "def wait_for_peer(collectives):\n"
        "    collectives.barrier()\n"
        "    if dist.get_rank() == 0:\n"
        "        collectives.barrier()\n"
        "    time.sleep(100)\n"
        "def body():\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        f"    {PLACES[place]}\n"
        "try:\n"
        "    gpucomm.launch(body, nprocs=2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(0.5)  # until they are there
        (os.kill if whom == "the launching process" else os.killpg)(process.pid, signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
        assert process.wait(30) == 0
    assert not any(os.path.exists(f"/proc/{rank}") for rank in ranks)
