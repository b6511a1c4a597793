"""DistributedDataParallel and Communicator on a GPU, over the stand-ins for the CUDA driver and NCCL.

What the CPU's suite says of DistributedDataParallel is said of this too: `make test-fake-gpu`.
"""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from expect import raises
from fake_cuda.ranks import on_gpu
from fake_cuda.shim import values
from gradients import mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from toys import batch, mlp

from gpucomm import Communicator, NonFinite, cuda
from gpucomm import DistributedDataParallel as Ours
from gpucomm.errors import CommError, PeerFailed, TransportUnavailable

SEEDS = range(3)


@pytest.fixture(autouse=True)
def stand_in(fake_cuda):
    """Built before the ranks are forked; skips where there is no compiler."""


def gradients(ddp):
    return {name: param.grad for name, param in ddp.module.named_parameters()}


def loss_of(module, rank, iteration):
    return module(batch(rank, iteration, 5, 24)).square().mean()


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_the_mean_over_the_ranks_in_whatever_order_the_streams_run(seed):
    def body(rank, world):
        model = mlp()
        expected = [mean_gradients(model, lambda m, r, i=i: loss_of(m, r, i), world) for i in range(3)]
        with on_gpu(rank, world, seed=seed):
            ours = Ours(model)
            assert ours.transport == "nccl"
            for iteration in range(3):
                ours.zero_grad()
                loss_of(ours, rank, iteration).backward()
                for name, grad in gradients(ours).items():
                    torch.testing.assert_close(grad, expected[iteration][name])

    run_ranks(body, 2)


@pytest.mark.parametrize("version", [21805, 22105, 22809, 23203])
def test_it_works_with_every_nccl_from_2_18_on(version):
    def body(rank, world):
        with on_gpu(rank, world, version=version):
            ours = Ours(mlp(), bucket_cap_mb=0.001)
            for iteration in range(2):
                ours.zero_grad()
                loss_of(ours, rank, iteration).backward()
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 3)


def test_a_forward_on_a_stream_of_its_own_is_ordered_with_the_reduction():
    def body(rank, world):
        model = mlp()
        expected = mean_gradients(model, lambda m, r: loss_of(m, r, 0), world)
        with on_gpu(rank, world) as shim:
            ours = Ours(model)
            side = shim.program.stream("side stream")
            for _ in range(3):
                ours.zero_grad()
                shim.control.wait_stream(side, shim.current)
                with shim.stream(side):
                    loss = loss_of(ours, rank, 0)
                shim.control.wait_stream(shim.current, side)
                loss.backward()
                for name, grad in gradients(ours).items():
                    torch.testing.assert_close(grad, expected[name])

    run_ranks(body, 2)


def test_buckets_are_packed_whole_and_launched_while_backward_runs():
    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(mlp(), bucket_cap_mb=0.001)
            for iteration in range(3):
                loss_of(ours, rank, iteration).backward()
            last = ours._reduction.engine.iteration
            events = [event for event in ours.trace() if event.iteration == last]
            packed = [event for event in events if event.kind == "pack_bucket"]
            ready = [event for event in events if event.kind == "ready"]
            assert len(packed) == len(ours._reduction.plan.buckets) > 2
            assert len(ready) == len(list(ours.parameters()))
            assert packed[0].end_ns < ready[-1].begin_ns

    run_ranks(body, 2)


def test_an_iteration_allocates_nothing_on_the_device():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            ours = Ours(mlp())
            for iteration in range(4):
                if iteration == 3:
                    before = [shim.control.calls(name) for name in ("cuMemAlloc_v2", "cuMemHostAlloc", "ncclMemAlloc")]
                ours.zero_grad()
                loss_of(ours, rank, iteration).backward()
            after = [shim.control.calls(name) for name in ("cuMemAlloc_v2", "cuMemHostAlloc", "ncclMemAlloc")]
            assert after == before

    run_ranks(body, 2)


def test_the_norm_is_summed_up_beside_backward_where_the_program_promises_not_to_write_to_gradients():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            ours = Ours(mlp(), bucket_cap_mb=0.001)

            def clip_with_launches(iteration, change=lambda: None):
                ours.zero_grad()
                loss_of(ours, rank, iteration).backward()
                change()
                with cuda.gpu.host():
                    expected = torch.cat([torch.tensor(values(shim, p.grad)) for p in ours.parameters()]).norm().item()
                measured = ours._reduction.norm._measured(2.0) is not None
                assert values(shim, ours.clip_grad_norm_(0.1, untouched=True).view(1)) == pytest.approx(
                    [expected], rel=1e-5
                )
                return measured

            assert not clip_with_launches(0)
            assert clip_with_launches(1)
            assert clip_with_launches(2)
            assert not clip_with_launches(3, lambda: ours.module[0].weight.grad.mul_(2))
            assert clip_with_launches(4)

    run_ranks(body, 2)


def unscale(grads):
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.full((1,), 1 / 64))


@pytest.mark.parametrize(
    "write",
    [unscale, lambda grads: [grad.data.div_(64) for grad in grads], lambda grads: [dist.all_reduce(g) for g in grads]],
    ids=["a scaler", "through .data", "a collective"],
)
def test_a_write_to_gradients_that_torch_does_not_count_is_in_the_norm(write):
    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(mlp(), bucket_cap_mb=0.001)
            for iteration in range(4):
                ours.zero_grad()
                loss_of(ours, rank, iteration).backward()
                write([p.grad for p in ours.parameters()])
                expected = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
                torch.testing.assert_close(ours.clip_grad_norm_(0.1), expected)

    run_ranks(body, 2)


def test_what_a_communication_hook_made_is_in_the_norm_whatever_is_promised():
    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(mlp(), bucket_cap_mb=0.001)
            ours.register_comm_hook(None, hook)
            for iteration in range(4):
                ours.zero_grad()
                loss_of(ours, rank, iteration).backward()
                expected = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
                torch.testing.assert_close(ours.clip_grad_norm_(0.1, untouched=True), expected)

    run_ranks(body, 1)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
def test_gradients_travel_in_16_bits(wire_dtype):
    def body(rank, world):
        model = mlp()
        expected = mean_gradients(model, lambda m, r: loss_of(m, r, 0), world)
        with on_gpu(rank, world):
            ours = Ours(model, wire_dtype=wire_dtype)
            for _ in range(2):
                ours.zero_grad()
                loss_of(ours, rank, 0).backward()
            for name, grad in gradients(ours).items():
                assert grad.dtype == torch.float32
                torch.testing.assert_close(grad, expected[name], rtol=2**-6, atol=1e-4)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_gradient_that_is_not_finite_is_named_on_every_rank():
    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(mlp(), nonfinite="raise")
            loss_of(ours, rank, 0).backward()
            ours.zero_grad()
            scale = float("nan") if rank == 1 else 1.0
            with pytest.raises(NonFinite, match="on rank 1"):
                (loss_of(ours, rank, 1) * scale).backward()
            ours.zero_grad()
            loss_of(ours, rank, 2).backward()
            assert all(bool(p.grad.isfinite().all()) for p in ours.parameters())

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_transport_that_reduces_in_host_memory_is_refused(transport):
    def body(rank, world):
        with on_gpu(rank, world):
            raises(
                TransportUnavailable,
                f"transport '{transport}' reduces in host memory",
                lambda: Ours(mlp(), transport=transport),
            )

    run_ranks(body, 2)


def test_two_ranks_on_one_gpu_are_named():
    def body(rank, world):
        with on_gpu(0, world):
            raises(TransportUnavailable, "ranks 0 and 1 both use .* of .*LOCAL_RANK", lambda: Ours(mlp()))

    run_ranks(body, 2)


def test_a_rank_without_nccl_is_named_on_every_rank(monkeypatch):
    def body(rank, world):
        with on_gpu(rank, world):
            if rank == 1:
                monkeypatch.setenv("GPUCOMM_NCCL_LIBRARY", "libthere_is_none.so")
            raises(TransportUnavailable, "rank 1 cannot use NCCL: .*libthere_is_none.so", lambda: Ours(mlp()))

    run_ranks(body, 2)


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("avg", 1.5), ("min", 1.0), ("max", 2.0), ("prod", 2.0)])
def test_a_communicator_takes_arrays_of_the_gpu_and_of_the_host(op, expected):
    def body(rank, world):
        with on_gpu(rank, world) as shim, Communicator(transport="nccl") as comm:
            assert comm.transport == "nccl"
            x = torch.full((7,), rank + 1.0)
            assert comm.all_reduce(x, op) is x
            assert values(shim, x) == [expected] * 7
            work = comm.all_reduce(y := torch.full((5,), rank + 1.0), op, async_op=True)
            work.wait()
            assert values(shim, y) == [expected] * 5
            gathered = torch.empty(world * 3)
            comm.all_gather(gathered, torch.full((3,), float(rank)))
            assert values(shim, gathered) == [float(r) for r in range(world) for _ in range(3)]
            comm.broadcast(z := torch.full((2,), float(rank)), root=1)
            assert values(shim, z) == [1.0, 1.0]
            assert comm.all_gather_bytes(bytes([rank])) == [b"\0", b"\1"]

    run_ranks(body, 2)


def test_an_error_on_the_device_ends_every_rank_and_no_optimizer_steps_after_it():
    def body(rank, world):
        with on_gpu(rank, world, script="async_error rank=0 comm=0 launch=20 result=6"):
            ours = Ours(mlp(), bucket_cap_mb=0.001, timeout=3)
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)

            def train():
                for iteration in range(200):
                    optimizer.zero_grad()
                    loss_of(ours, rank, iteration).backward()
                    time.sleep(0.05)  # the watcher looks every 20 ms
                    optimizer.step()

            with pytest.raises(CommError) as caught:
                train()
            text = str(caught.value)
            if rank == 0:
                assert "a peer died or lost its connection" in text, text
            else:  # a host that waits for its GPU, as the stand-in's does for torch's ops, learns it at the timeout
                assert "rank 0" in text or "not complete within 3 s" in text, text
            for param in ours.parameters():
                param.grad = torch.ones_like(param)
            with pytest.raises(CommError, match="this wrapper is dead"):
                optimizer.step()

    run_ranks(body, 2)


class Foreign:
    """An array of a library that knows no DLPack, over a tensor's memory."""

    def __init__(self, tensor, typestr="<f4", strides=None):
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "strides": strides,
            "version": 3,
        }


def test_arrays_with_nothing_but_a_cuda_array_interface_are_reduced():
    def body(rank, world):
        with on_gpu(rank, world) as shim, Communicator(transport="nccl") as comm:
            x = torch.full((2, 3), rank + 1.0)
            foreign = Foreign(x, strides=(12, 4))
            assert comm.all_reduce(foreign) is foreign
            assert values(shim, x) == [3.0] * 6
            raises(ValueError, "all_reduce: x is not contiguous", lambda: comm.all_reduce(Foreign(x, strides=(4, 8))))
            raises(TypeError, "__cuda_array_interface__ of this Foreign", lambda: comm.all_reduce(Foreign(x, "|b1")))

    run_ranks(body, 2)


def test_the_death_of_a_rank_of_the_same_host_ends_what_waits_for_it_on_the_device():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            comm = Communicator(transport="nccl", timeout=60)
            comm.all_reduce(torch.ones(3))
            shim.synchronize()
            if rank == 1:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            before = time.monotonic()
            comm.all_reduce(torch.ones(3))  # the host goes on, and might wait for its GPU from now on
            error = None
            while error is None and time.monotonic() < before + 20:
                try:
                    comm._gpus.transport.check_failure()
                except PeerFailed as caught:
                    error = caught
            assert error is not None
            assert error.rank == 1
            assert "its process ended, and all_reduce of 3 float32 is not complete" in str(error)
            return time.monotonic() - before

    survivor, dead = run_ranks(body, 2, expect_failures=True)
    assert dead.exitcode == -signal.SIGKILL
    assert survivor.value < 5, survivor  # the deadline that is promised


# ---- CUDA graphs: the stand-in holds the rules of a capture, and runs what is captured once, as it is captured


@contextlib.contextmanager
def captured(shim):
    """What torch.cuda.graph does: the device has nothing to do when it begins, and a stream of its own is current."""
    shim.synchronize()
    stream = shim.program.stream("capture")
    with shim.stream(stream), shim.control.capture(stream):
        yield
        time.sleep(0.05)  # in which threads that watch NCCL look
    shim.control.wait_stream(shim.current, stream)  # as after a replay


def train(ours, optimizer, rank, iteration):
    optimizer.zero_grad()
    loss_of(ours, rank, iteration).backward()
    optimizer.step()


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("forked", [False, True])
def test_a_whole_iteration_is_captured_and_those_around_it_are_right(forked, wire_dtype):
    def body(rank, world):
        model, single = mlp(), mlp()
        reference = torch.optim.SGD(single.parameters(), lr=0.1)
        expected = []
        for iteration in range(6):
            means = mean_gradients(single, lambda m, r, i=iteration: loss_of(m, r, i), world)
            for name, param in single.named_parameters():
                param.grad = means[name]
            reference.step()
            expected.append({name: param.detach().clone() for name, param in single.named_parameters()})
        tolerance = {} if wire_dtype is None else {"rtol": 0.02, "atol": 0.02}

        def check(iteration):
            for name, param in model.named_parameters():
                torch.testing.assert_close(param.detach(), expected[iteration][name], **tolerance)

        with on_gpu(rank, world) as shim:
            ours = Ours(model, bucket_cap_mb=0.001, wire_dtype=wire_dtype)
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
            side = shim.program.stream("forked")
            for iteration in range(6):
                if iteration in (2, 3):
                    calls = [shim.control.calls(name) for name in ("cuMemAlloc_v2", "cuMemHostAlloc", "ncclMemAlloc")]
                    with captured(shim):
                        if not forked:
                            train(ours, optimizer, rank, iteration)
                        else:
                            optimizer.zero_grad()
                            shim.control.wait_stream(side, shim.current)
                            with shim.stream(side):
                                loss = loss_of(ours, rank, iteration)
                            shim.control.wait_stream(shim.current, side)
                            loss.backward()
                            optimizer.step()
                    assert calls == [
                        shim.control.calls(name) for name in ("cuMemAlloc_v2", "cuMemHostAlloc", "ncclMemAlloc")
                    ]
                else:
                    train(ours, optimizer, rank, iteration)
                check(iteration)

    run_ranks(body, 2)


class BackToFront(torch.nn.Module):
    """Gradients come in another order than that in which the first plan expects them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first = torch.nn.Linear(20, 3), torch.nn.Linear(24, 20)

    def forward(self, x):
        return self.last(self.first(x).relu())


def weighted(ours, optimizer, rank):
    with ours.weight(2):
        train(ours, optimizer, rank, 2)


UNCAPTURABLE = {
    "raise": ({"nonfinite": "raise"}, 2, train, "nonfinite='raise' has the host read"),
    "skip": ({"nonfinite": "skip"}, 2, train, "nonfinite='skip' has the host read"),
    "weight": ({}, 2, lambda ours, optimizer, rank, _: weighted(ours, optimizer, rank), r"weight\(\) divides by what"),
    "first": ({}, 0, train, "run two iterations of the same kind before"),
    "second": ({"bucket_cap_mb": 0.001}, 1, train, "run two iterations of the same kind before"),
    "kept": ({}, 2, train, "the program keeps a gradient of an earlier iteration"),
    "hook": ({}, 2, train, "a communication hook is called by the host"),
}


@pytest.mark.parametrize("what", UNCAPTURABLE)
def test_what_a_replay_would_not_do_is_refused_before_anything_is_captured_of_it(what):
    arguments, warmed_up, iterate, text = UNCAPTURABLE[what]

    def body(rank, world):
        with on_gpu(rank, world) as shim:
            ours = Ours(BackToFront(), **arguments)
            if what == "hook":
                ours.register_comm_hook(None, allreduce_hook)
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
            for iteration in range(warmed_up):
                train(ours, optimizer, rank, iteration)
            kept = [p.grad for p in ours.parameters()] if what == "kept" else []
            with captured(shim):
                raises(RuntimeError, text, lambda: iterate(ours, optimizer, rank, 2))
            del kept[:]
            expected = mean_gradients(ours.module, lambda m, r: loss_of(m, r, 3), world)
            train(ours, optimizer, rank, 3)
            for name, grad in gradients(ours).items():
                torch.testing.assert_close(grad, expected[name])

    run_ranks(body, 2)


def test_memory_that_a_graph_writes_to_stays_when_the_buckets_move():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            ours = Ours(mlp())
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
            train(ours, optimizer, rank, 0)
            train(ours, optimizer, rank, 1)
            with captured(shim):
                train(ours, optimizer, rank, 2)
            of_graph = [p.grad.data_ptr() for p in ours.parameters()]
            kept = [p.grad for p in ours.parameters()]
            train(ours, optimizer, rank, 3)  # into new buckets, for what is kept is not overwritten
            del kept
            optimizer.zero_grad()
            assert all(p.grad is None for p in ours.parameters())
            train(ours, optimizer, rank, 4)
            assert {p.grad.data_ptr() for p in ours.parameters()}.isdisjoint(of_graph)
            assert all(shim.control.allocation(address) is not None for address in of_graph)

    run_ranks(body, 2)


def test_memory_of_earlier_buckets_may_be_given_back_during_a_capture():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            ours = Ours(mlp())
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
            train(ours, optimizer, rank, 0)
            kept = [p.grad for p in ours.parameters()]
            train(ours, optimizer, rank, 1)
            train(ours, optimizer, rank, 2)
            address = kept[0].data_ptr()
            assert shim.control.allocation(address) is not None
            with captured(shim):
                del kept[:]
                train(ours, optimizer, rank, 3)
            assert shim.control.allocation(address) is None

    run_ranks(body, 2)
