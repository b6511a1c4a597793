"""What every rank gets when one of them dies, stops, raises, leaves or does something else, without torchrun's agent.

The only assertions on time are the deadlines within which a failure must be known.
"""

import contextlib
import functools
import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from gradients import assert_mean, mean_gradients
from programs import (
    PROGRAMS,
    Communication,
    FailingBackward,
    Model,
    Training,
    assert_dead,
    assert_nothing_left,
    each_program,
    each_transport,
    error_of,
    iterate_until_it_fails,
    note_now,
    own_footprint,
    pids_of_all,
    seconds_since,
)
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint
from toys import batch, mlp

import gpucomm
from gpucomm import Communicator, DistributedDataParallel
from gpucomm.errors import CollectiveMismatch, CommError, CommTimeout, ModelsDiffer, PeerFailed, StepFailed
from gpucomm.transport import C10dTransport

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

# Seconds until a death is known: shared memory watches the processes, over sockets the group's own news is awaited.
KNOWN_WITHIN_S = {"shm": 2.0, "c10d": 5.0}


@each_transport
@each_program
def test_survivors_of_a_killed_rank_learn_who_it_was(program, transport):
    def body(rank, world):
        before = own_footprint()
        running = PROGRAMS[program](transport)
        for _ in range(3):
            running.iterate()
        if rank == 1:
            note_now("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        kind, text, attributes = error_of(iterate_until_it_fails, running)
        seconds = seconds_since("killed")
        assert kind is PeerFailed, (kind, text)
        assert attributes["rank"] == 1, text
        assert "rank 1" in text
        assert seconds < KNOWN_WITHIN_S[transport]
        assert_dead(running)
        del running
        assert_nothing_left(before)

    first, killed, last = run_ranks(body, 3, expect_failures=True)
    assert killed.exitcode == -signal.SIGKILL
    for survivor in (first, last):
        assert survivor.complaint() is None, survivor.complaint()


@each_transport
@each_program
def test_a_stopped_rank_is_missed_at_the_timeout(program, transport):
    timeout_s = 1.5

    def body(rank, world):
        before = own_footprint()
        pids = pids_of_all(world)
        running = PROGRAMS[program](transport, timeout_s)
        for _ in range(3):
            running.iterate()
        if rank == 1:
            note_now("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        kind, text, attributes = error_of(iterate_until_it_fails, running)
        seconds = seconds_since("stopped")
        assert kind is CommTimeout, (kind, text)
        assert attributes["missing"] == [1], text
        assert timeout_s * 0.9 < seconds < timeout_s + 3
        if program == "training":
            names = [name for name, _ in Model().named_parameters()]
            assert attributes["parameters"], text
            assert set(attributes["parameters"]) <= set(names)
            assert isinstance(attributes["bucket"], int)
            assert all(name in text for name in attributes["parameters"])
        assert_dead(running)
        del running
        assert_nothing_left(before)
        os.kill(pids[1], signal.SIGKILL)

    first, stopped = run_ranks(body, 2, expect_failures=True)
    assert first.complaint() is None, first.complaint()
    assert stopped.exitcode == -signal.SIGKILL
    assert not stopped.hung


@each_transport
def test_a_rank_that_goes_on_after_it_was_given_up_is_told(transport):
    def body(rank, world):
        pids = pids_of_all(world)
        running = Communication(transport, timeout=1)
        running.iterate()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            kind, text, _ = error_of(iterate_until_it_fails, running)
            assert issubclass(kind, CommError), (kind, text)
            return
        kind, text, attributes = error_of(iterate_until_it_fails, running)
        assert (kind, attributes["missing"]) == (CommTimeout, [1]), text
        os.kill(pids[1], signal.SIGCONT)

    run_ranks(body, 2)


@each_transport
@each_program
def test_an_interrupt_ends_every_rank_that_works(program, transport):
    def body(rank, world):
        pids = pids_of_all(world)
        running = PROGRAMS[program](transport)
        running.iterate()
        if rank == 0:
            threading.Timer(0.3, interrupt, (pids,)).start()
        try:
            iterate_until_it_fails(running)
        finally:
            assert seconds_since("interrupted") < 3

    assert_interrupted(run_ranks(body, 2, expect_failures=True))


@each_transport
@each_program
def test_an_interrupt_ends_every_rank_that_waits(program, transport):
    def body(rank, world):
        pids = pids_of_all(world)
        running = PROGRAMS[program](transport)
        running.iterate()
        if rank == 0:
            threading.Timer(0.5, interrupt, (pids,)).start()
        try:
            if rank == 0:
                threading.Event().wait(30)
            running.iterate()
        finally:
            assert seconds_since("interrupted") < 3

    assert_interrupted(run_ranks(body, 3, expect_failures=True))


@each_program
@pytest.mark.parametrize("started", [True, False])
def test_an_interrupt_while_an_operation_is_started_ends_every_rank(program, started, monkeypatch):
    """The order of operations is lost: one started twice, or not at all, would be paired with a peer's next."""
    start = C10dTransport._start

    def interrupted_start(self, what, operation):
        if armed and dist.get_rank() == 1 and what == "all_reduce":
            if started:
                start(self, what, operation)
            raise KeyboardInterrupt
        return start(self, what, operation)

    armed = []
    monkeypatch.setattr(C10dTransport, "_start", interrupted_start)

    def body(rank, world):
        running = PROGRAMS[program]("c10d")
        running.iterate()
        armed.append(True)
        kind, text, attributes = error_of(running.iterate)
        armed.clear()
        assert_dead(running)
        return kind, attributes.get("rank"), text

    waited, interrupted = run_ranks(body, 2)
    assert interrupted[0] is KeyboardInterrupt
    assert waited[:2] == (PeerFailed, 1)
    assert "KeyboardInterrupt" in waited[2]


def assert_interrupted(outcomes):
    """All ended; one that had not seen its own signal yet may have heard of a peer's first."""
    kinds = [outcome.error_type for outcome in outcomes]
    assert "KeyboardInterrupt" in kinds, kinds
    for outcome in outcomes:
        assert outcome.error_type in ("KeyboardInterrupt", "PeerFailed"), outcome.complaint()


def interrupt(pids):
    note_now("interrupted")
    for pid in pids:
        os.kill(pid, signal.SIGINT)


@each_transport
def test_a_backward_that_raises_fails_the_iteration_everywhere_and_no_other(transport):
    def body(rank, world, disturbed):
        training = Training(transport)
        for iteration in range(6):
            if iteration != 3:
                training.iterate()
                continue
            if not disturbed:  # the same data is drawn, nothing is learnt
                torch.randn(8, 60, generator=training.data)
                continue
            FailingBackward.armed = rank == 1
            kind, text, _ = error_of(training.backward)
            FailingBackward.armed = False
            if rank == 1:
                assert kind is ArithmeticError, (kind, text)
            else:
                assert kind is StepFailed, (kind, text)
                assert text.endswith("failed on rank 1: ArithmeticError: this rank's backward failed"), text
        return training.parameters()

    disturbed = run_ranks(body, 3, True)
    calm = run_ranks(body, 3, False)
    for parameters in disturbed:
        assert all(torch.equal(a, b) for a, b in zip(parameters, calm[0], strict=True))


class Unprintable(Exception):
    def __str__(self):
        raise AttributeError("no text")


class RaisingBackward(torch.autograd.Function):
    error = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if RaisingBackward.error is not None:
            raise RaisingBackward.error
        return grad


@pytest.mark.parametrize("error", [ValueError("boom"), Unprintable()])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_raise_is_known_at_once_whatever_the_program_keeps(checkpointed, error):
    """A reentrant checkpoint has a backward of its own, and the loss keeps the graph in which its end is awaited."""

    def body(rank, world):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        ddp = DistributedDataParallel(model, timeout=10)
        said, kept = [], []
        for iteration in range(4):
            RaisingBackward.error = error if iteration == 1 and rank == 0 else None
            ddp.module[1].forward = (
                functools.partial(checkpointed_part, model[1]) if checkpointed else functools.partial(part, model[1])
            )
            loss = ddp(torch.randn(3, 4)).sum()
            kept.append(loss)
            try:
                loss.backward()
                said.append("done")
            except Exception as caught:
                kept.append(caught)
                said.append(type(caught).__name__)
            ddp.zero_grad()
        return said

    assert run_ranks(body, 2) == [
        ["done", type(error).__name__, "done", "done"],
        ["done", "StepFailed", "done", "done"],
    ]


def part(linear, x):
    return RaisingBackward.apply(torch.nn.functional.linear(x, linear.weight, linear.bias))


def checkpointed_part(linear, x):
    return checkpoint(functools.partial(part, linear), x, use_reentrant=True)


@each_transport
def test_gradients_of_a_failed_iteration_are_not_applied(transport):
    def body(rank, world):
        training = Training(transport)
        training.iterate()
        before = training.parameters()
        FailingBackward.armed = rank == 1
        with contextlib.suppress(ArithmeticError, StepFailed):
            training.backward()
        FailingBackward.armed = False
        with contextlib.suppress(RuntimeError):
            training.optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, training.parameters(), strict=True))

    run_ranks(body, 2)


@each_transport
def test_nothing_of_a_failed_iteration_is_left_for_the_next_one(transport):
    """A hook of the program raises between the gradient and its packing, and nobody calls zero_grad()."""

    def body(rank, world):
        ddp = DistributedDataParallel(mlp(), transport=transport, bucket_cap_mb=0.001)

        def loss(model, r, iteration):
            return model(batch(r, iteration, 3, 24)).square().mean()

        with ddp.no_sync():
            loss(ddp, rank, 0).backward()
        if rank == 1:
            raising = list(ddp.parameters())[4].register_post_accumulate_grad_hook(lambda param: 1 / 0)
        with pytest.raises((ZeroDivisionError, StepFailed)):
            loss(ddp, rank, 1).backward()
        assert all(param.grad is None for param in ddp.parameters())
        if rank == 1:
            raising.remove()
        expected = mean_gradients(ddp.module, lambda model, r: loss(model, r, 2), world)
        loss(ddp, rank, 2).backward()
        assert_mean(ddp, expected)

    run_ranks(body, 2)


@pytest.mark.parametrize("begins_again", [False, True])
def test_a_local_backward_that_raised_fails_the_iteration_unless_it_begins_again(begins_again):
    def body(rank, world):
        ddp = DistributedDataParallel(mlp(), timeout=20)

        def loss(model, r, iteration):
            return model(batch(r, iteration, 3, 24)).square().mean()

        if begins_again or rank == 1:
            raising = ddp.module[2].weight.register_hook(lambda grad: 1 / 0)
            with ddp.no_sync(), pytest.raises(ZeroDivisionError):
                loss(ddp, rank, 0).backward()
            raising.remove()
        else:
            with ddp.no_sync():
                loss(ddp, rank, 0).backward()
        if not begins_again:
            with pytest.raises(StepFailed, match=r"rank 1: .* no_sync"):
                loss(ddp, rank, 1).backward()
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda model, r: loss(model, r, 2), world)
        loss(ddp, rank, 2).backward()
        assert_mean(ddp, expected)

    run_ranks(body, 2)


def test_a_rank_that_begins_an_iteration_again_alone_is_noticed_everywhere():
    def body(rank, world):
        ddp = DistributedDataParallel(mlp(), timeout=20)
        raising = ddp.module[2].weight.register_hook(lambda grad: 1 / 0 if rank == 1 else None)
        with ddp.no_sync(), pytest.raises(ZeroDivisionError) if rank == 1 else contextlib.nullcontext():
            ddp(batch(rank, 0, 3, 24)).square().mean().backward()
        raising.remove()
        if rank == 1:
            ddp.zero_grad()
        with pytest.raises(StepFailed, match="backwards since the last reduction is 2 on rank 0, 1 on rank 1"):
            ddp(batch(rank, 1, 3, 24)).square().mean().backward()

    run_ranks(body, 2)


def test_a_wrapper_made_anew_after_a_failure_trains_though_the_dead_one_is_kept():
    def body(rank, world):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dead = DistributedDataParallel(model, timeout=1)
        if rank == 0:
            with pytest.raises(CommTimeout):
                dead(batch(0, 0, 3, 24)).square().mean().backward()
            optimizer.zero_grad()
        dist.barrier()
        alive = DistributedDataParallel(model)
        before = [param.detach().clone() for param in model.parameters()]
        alive(batch(rank, 1, 3, 24)).square().mean().backward()
        optimizer.step()
        assert not any(map(torch.equal, before, model.parameters()))

    run_ranks(body, 2)


def test_a_peer_that_gave_up_for_a_dead_one_is_not_blamed():
    def body(rank, world):
        transport = C10dTransport(dist.group.WORLD, 30)
        if rank == 2:
            transport._failure = PeerFailed("rank 1 failed: no sign of life", 1, "no sign of life")
            transport.abort("what the wrapper says")
        dist.barrier()
        left = transport._left(transport._heard(dist.distributed_c10d._get_process_group_store(dist.group.WORLD)))
        dist.barrier()  # before one of them closes its transport
        if rank != 2:
            assert left == ((1, "no sign of life") if rank == 0 else (2, "gave up for rank 1: no sign of life"))

    run_ranks(body, 3)


def two_barriers(comm):
    comm.barrier()  # where a slow rank may already hear what the other found in the next
    comm.barrier()


@each_transport
def test_a_closed_communicator_fails_the_peers_that_wait_for_it(transport):
    def body(rank, world):
        before = own_footprint()
        comm = Communicator(transport=transport, timeout=20)
        if rank == 1:
            comm.barrier()
            note_now("closed")
            comm.close()
            return

        kind, text, attributes = error_of(functools.partial(two_barriers, comm))
        assert kind is PeerFailed, (kind, text)
        assert attributes["rank"] == 1, text
        assert seconds_since("closed") < KNOWN_WITHIN_S[transport]
        comm.close()
        del comm
        assert_nothing_left(before)

    run_ranks(body, 3)


@each_transport
def test_what_a_rank_did_before_it_closed_counts(transport):
    def body(rank, world):
        for _ in range(20):
            with Communicator(transport=transport, timeout=20) as comm:
                x = torch.ones(100000)
                comm.all_reduce(x)
                assert (x == world).all()

    run_ranks(body, 2)


@each_transport
def test_a_wrapper_that_is_dropped_fails_the_peers_that_train_on(transport):
    def body(rank, world):
        training = Training(transport, timeout=20)
        training.iterate()
        if rank == 1:
            del training
            gc.collect()
            return
        kind, text, attributes = error_of(iterate_until_it_fails, training)
        assert kind is PeerFailed, (kind, text)
        assert attributes["rank"] == 1

    run_ranks(body, 2)


@each_transport
def test_an_extra_backward_of_one_rank_fails_the_iteration_everywhere(transport):
    def body(rank, world):
        training = Training(transport)
        training.iterate()
        if rank == 1:
            with training.ddp.no_sync():
                training.ddp(torch.ones(1, 60)).sum().backward()
        kind, text, _ = error_of(training.backward)
        assert kind is StepFailed, (kind, text)
        assert "2 on rank 1" in text
        assert "1 on rank 0" in text
        training.iterate()
        return training.parameters()

    first, *others = run_ranks(body, 3)
    for parameters in others:
        assert all(torch.equal(a, b) for a, b in zip(parameters, first, strict=True))


@each_transport
def test_a_rank_that_skips_an_iteration_fails_every_rank(transport):
    def body(rank, world):
        store = dist.distributed_c10d._get_default_store()
        training = Training(transport, timeout=1)
        training.iterate()
        if rank == 1:
            store.wait(["given_up"])
            # Over sockets, what the peers had sent before they gave up still makes one complete iteration.
            kind, text, _ = error_of(iterate_until_it_fails, training)
            assert issubclass(kind, CommError), (kind, text)
            return
        kind, text, attributes = error_of(training.iterate)
        store.set("given_up", "")
        assert (kind, attributes["missing"]) == (CommTimeout, [1]), text

    run_ranks(body, 2)


def test_different_collectives_raise_on_every_rank_with_both():
    def body(rank, world):
        pairs = [
            (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(4)), ("3 float32", "4 float32")),
            (
                lambda c: c.all_reduce(torch.ones(3000)),
                lambda c: c.all_reduce(torch.ones(3000).half()),
                ("3000 float32", "3000 float16"),
            ),
            (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(3), "max"), ("sum", "max")),
            (lambda c: c.barrier(), lambda c: c.broadcast(torch.ones(3)), ("barrier", "broadcast")),
            (lambda c: c.broadcast(torch.ones(3), 0), lambda c: c.broadcast(torch.ones(3), 1), ("rank 0", "rank 1")),
        ]
        for most, one, words in pairs:
            comm = Communicator(transport="shm", timeout=20)
            kind, text, _ = error_of(lambda: (one if rank == 1 else most)(comm))
            assert kind is CollectiveMismatch, (kind, text)
            assert all(word in text for word in words), text
            for later in (comm.barrier, lambda: comm.empty(3), comm.barrier):
                kind, dead, _ = error_of(later)
                assert kind is CollectiveMismatch
                assert dead == f"this communicator is dead since an earlier operation: {text}"
            comm.close()

    run_ranks(body, 3)


def _linears(*shapes, dtype=torch.float32):
    return torch.nn.Sequential(*(torch.nn.Linear(*shape, dtype=dtype) for shape in shapes))


def _named(*names):
    module = torch.nn.Module()
    for name in names:
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))
    return module


MODELS = {
    "number": (lambda: _linears((2, 3)), lambda: _linears((2, 3), (3, 2)), ("2 parameters", "4", "1.weight")),
    "shape": (lambda: _linears((2, 3)), lambda: _linears((2, 4)), ("0.weight", "(3, 2)", "(4, 2)")),
    "dtype": (lambda: _linears((2, 3)), lambda: _linears((2, 3), dtype=torch.float64), ("0.weight", "float64")),
    "order": (lambda: _named("a", "b"), lambda: _named("b", "a"), ("parameter 0", "a", "b")),
}


@each_transport
@pytest.mark.parametrize("what", MODELS)
def test_mismatched_models_raise_at_construction_with_the_first_difference(transport, what):
    usual, other, words = MODELS[what]

    def body(rank, world):
        before = own_footprint()
        module = other() if rank == 2 else usual()
        kind, text, _ = error_of(lambda: DistributedDataParallel(module, transport=transport))
        assert kind is ModelsDiffer, (kind, text)
        assert all(word in text for word in (*words, "rank 0", "rank 2")), text
        assert_nothing_left(before)

    run_ranks(body, 3)


@each_transport
@each_program
def test_another_version_raises_at_construction_on_every_rank(program, transport, monkeypatch):
    def body(rank, world):
        if rank == 1:
            monkeypatch.setattr(gpucomm.world, "__version__", "9.9.9")
        kind, text, _ = error_of(lambda: PROGRAMS[program](transport))
        assert issubclass(kind, CommError), (kind, text)
        assert "9.9.9 on rank 1" in text.replace("'", ""), text
        assert f"{gpucomm.__version__} on rank 0" in text.replace("'", "")

    run_ranks(body, 2)


@each_transport
def test_a_peer_that_never_comes_to_construction_is_named(transport):
    def body(rank, world):
        if rank == 1:
            return
        kind, text, attributes = error_of(lambda: Communicator(transport=transport, timeout=0.5))
        assert kind is CommTimeout, (kind, text)
        assert attributes["missing"] == [1]

    run_ranks(body, 3)


def test_no_names_in_shared_memory_at_any_time():
    def body(rank, world):
        with Communicator(transport="shm") as comm:
            comm.all_reduce(comm.empty(100))
            assert not own_footprint().shm_entries
            comm.barrier()

    run_ranks(body, 2)


@each_transport
def test_operations_after_a_failure_say_that_the_communicator_is_dead_and_why(transport):
    def body(rank, world):
        comm = Communicator(transport=transport, timeout=20 if rank == 0 else 1)
        comm.barrier()
        if rank == 1:
            comm.close()
            return
        kind, text, attributes = error_of(functools.partial(two_barriers, comm))
        assert kind is PeerFailed
        for _ in range(3):
            again, dead, theirs = error_of(comm.barrier)
            assert again is PeerFailed
            assert dead == f"this communicator is dead since an earlier operation: {text}"
            assert theirs == attributes

    run_ranks(body, 2)


@each_transport
def test_operations_after_a_timeout_say_that_the_communicator_is_dead_and_why(transport):
    def body(rank, world):
        comm = Communicator(transport=transport, timeout=0.5)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["over"])
            return
        kind, text, attributes = error_of(comm.barrier)
        assert kind is CommTimeout
        for _ in range(3):
            again, dead, theirs = error_of(comm.barrier)
            assert (again, dead) == (kind, f"this communicator is dead since an earlier operation: {text}")
            assert theirs == attributes
        store.set("over", "")

    run_ranks(body, 2)


@each_transport
def test_a_failure_is_raised_by_every_wait_for_an_operation_in_flight(transport):
    def body(rank, world):
        comm = Communicator(transport=transport, timeout=20)
        comm.barrier()
        if rank == 1:
            time.sleep(0.3)
            comm.close()
            return
        work = [comm.all_reduce(torch.ones(100000), async_op=True) for _ in range(2)]
        for one in (*work, *work):
            kind, text, attributes = error_of(one.wait)
            assert (kind, attributes["rank"]) == (PeerFailed, 1), text
            assert error_of(one.done)[0] is PeerFailed
        assert_dead(comm)

    def assert_dead(comm):
        assert issubclass(error_of(comm.barrier)[0], CommError)

    run_ranks(body, 2)


@each_transport
def test_an_interrupt_in_a_wait_is_raised_by_later_waits_too(transport):
    def body(rank, world):
        comm = Communicator(transport=transport, timeout=20)
        comm.barrier()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["interrupted"])
            return
        work = comm.all_reduce(torch.ones(100000), async_op=True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        for _ in range(2):
            assert error_of(work.wait)[0] is KeyboardInterrupt
        store.set("interrupted", "")

    run_ranks(body, 2)
