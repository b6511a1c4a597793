"""What the engine does when, read from its trace, and what it is given: a plan, a transport."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from toys import TwoHeads, batch, mlp

import gpucomm.ddp.construction as ddp_module
from gpucomm import BucketPlan, Transport, _core
from gpucomm import DistributedDataParallel as Ours


class Staggered(nn.Module):
    """Gradients become ready in an order that is not that of registration."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in order)
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


def train(ours, rank, iterations, width=16):
    for iteration in range(iterations):
        ours.zero_grad()
        ours(batch(rank, iteration, 4, width)).square().mean().backward()


def last_iteration(ours):
    iteration = ours._reduction.engine.iteration
    return [event for event in ours.trace() if event.iteration == iteration]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_bucket_0_is_reducing_before_the_last_gradient_is_ready(transport):
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=0, transport=transport)
        train(ours, rank, 3, 24)
        events = last_iteration(ours)
        last_ready = max(e.begin_ns for e in events if e.kind == "ready")
        (reduce_0,) = [e for e in events if e.kind == "reduce" and e.id == 0]
        assert reduce_0.begin_ns < last_ready

    run_ranks(body, 2)


def test_each_gradient_is_ready_then_packed_and_its_bucket_reduced_after_its_last_pack():
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=0.003)
        train(ours, rank, 2, 24)
        events = last_iteration(ours)
        packs = {e.id: e for e in events if e.kind == "pack"}
        readies = {e.id: e for e in events if e.kind == "ready"}
        reduces = {e.id: e for e in events if e.kind == "reduce"}
        assert set(packs) == set(readies) == set(range(len(ours._reduction.params)))
        assert set(reduces) == set(range(len(ours._reduction.plan.buckets)))
        for index, bucket in enumerate(ours._reduction.plan.buckets):
            for slot in bucket.slots:
                assert readies[slot.parameter].begin_ns <= packs[slot.parameter].begin_ns
                assert packs[slot.parameter].end_ns <= reduces[index].begin_ns
            assert reduces[index].nbytes == bucket.nbytes
        begins = [reduces[i].begin_ns for i in range(len(reduces))]
        assert begins == sorted(begins), "buckets are launched in plan order"

    run_ranks(body, 2)


def test_the_plan_follows_rank_0s_ready_order_from_the_second_iteration_on():
    def body(rank, world):
        # On rank 1 gradients become ready in another order than on rank 0.
        ours = Ours(Staggered([2, 0, 3, 1] if rank == 0 else [0, 1, 2, 3]), bucket_cap_mb=0)
        assert ours._reduction.plan.parameters == [3, 2, 1, 0]
        train(ours, rank, 2)
        assert ours._reduction.plan.parameters == [1, 3, 0, 2]
        hash_then = ours._reduction.plan.layout_hash
        train(ours, rank, 2)
        return ours._reduction.plan.layout_hash == hash_then, [p.grad.sum().item() for p in ours.parameters()]

    first, second = run_ranks(body, 2)
    assert first == second
    assert first[0]


def test_a_plan_that_is_given_is_used_and_kept():
    def body(rank, world):
        model = Staggered([2, 0, 3, 1])
        learned = Ours(copy.deepcopy(model), bucket_cap_mb=0)
        train(learned, rank, 2)
        plan = BucketPlan.from_json(learned._reduction.plan.to_json())
        ours = Ours(copy.deepcopy(model), plan=plan)
        train(ours, rank, 2)
        assert ours._reduction.plan == plan
        for a, b in zip(learned.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    run_ranks(body, 2)


@pytest.mark.parametrize("wrong", ["missing", "numel", "twice", "unknown"])
def test_a_plan_of_another_model_is_refused(wrong):
    def body(rank, world):
        model = mlp()
        plan = Ours(copy.deepcopy(model))._reduction.plan.to_json()
        plan = {
            "missing": plan.replace('{"parameter": 0,', '{"parameter": 1,', 1),
            "numel": plan.replace('"numel": 24', '"numel": 25', 1),
            "twice": plan.replace('{"parameter": 1,', '{"parameter": 0,', 1),
            "unknown": plan.replace('{"parameter": 0,', '{"parameter": 99,', 1),
        }[wrong]
        with pytest.raises(ValueError, match="plan"):
            Ours(model, plan=BucketPlan.from_json(plan))

    run_ranks(body, 1)


@pytest.mark.parametrize("piece_bytes", [0, 64, 500, 4096])
def test_pieces_of_buckets_give_the_same_gradients_and_cover_every_element_once(piece_bytes, monkeypatch):
    monkeypatch.setitem(ddp_module._PIECE_BYTES, "doubling", piece_bytes)
    monkeypatch.setitem(ddp_module._PIECE_BYTES, "shm", piece_bytes)

    def body(rank, world):
        plain = mlp()
        transport = Doubling()
        arms = [Ours(copy.deepcopy(plain), bucket_cap_mb=0.004), Ours(copy.deepcopy(plain), transport=transport)]
        for iteration in range(3):
            for model, r in ((arms[0], rank), (plain, 0), (arms[1], 0)):
                model.zero_grad()
                model(batch(r, iteration, 4, 24)).square().mean().backward()
            for a, b in zip(plain.parameters(), arms[1].parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
        buckets = arms[1]._reduction.plan.buckets
        sizes = [numel for kind, numel in transport.log if kind == "all_reduce"]
        piece = piece_bytes // 4 or max(b.numel for b in buckets)
        assert sizes == 3 * [min(piece, b.numel - at) for b in buckets for at in range(0, b.numel, piece)]
        return [p.grad.clone() for p in arms[0].parameters()]

    whole, _ = run_ranks(body, 2)
    expected = mlp()
    for r in range(2):
        expected(batch(r, 2, 4, 24)).square().mean().div(2).backward()
    for a, b in zip(whole, expected.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


class Doubling(Transport):
    """Stands for two ranks that contribute the same: subclasses in Python are transports like any other."""

    def __init__(self):
        super().__init__(0, 2)
        self.log = []

    def name(self):
        return "doubling"

    def all_reduce(self, x, op):
        self.log.append(("all_reduce", x.numel()))
        x.mul_({"sum": 2}[op])
        return Done()

    def reduce_scatter(self, output, source, op):
        raise AssertionError("not used by the wrapper")

    def all_gather(self, output, source):
        output.view(2, -1).copy_(source)
        return Done()

    def broadcast(self, x, root):
        self.log.append(("broadcast", x.numel()))
        return Done()

    def barrier(self):
        return Done()


class Done:
    def is_completed(self):
        return True

    def wait(self):
        pass


def test_a_transport_written_in_python_serves_the_wrapper():
    def body(rank, world):
        transport = Doubling()
        plain = mlp()
        ours = Ours(copy.deepcopy(plain), transport=transport, bucket_cap_mb=0.003)
        assert ours.transport == "doubling"
        for iteration in range(3):
            for model in (plain, ours):
                model.zero_grad()
                model(batch(0, iteration, 4, 24)).square().mean().backward()
            for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
        buckets = ours._reduction.plan.buckets
        assert transport.log[-len(buckets) :] == [("all_reduce", b.numel) for b in buckets]

    run_ranks(body, 1)


def test_nothing_is_allocated_by_the_transport_once_training_runs():
    class Counting(Doubling):
        allocations = 0

        def allocate(self, nbytes):
            Counting.allocations += 1
            return super().allocate(nbytes)

    def body(rank, world):
        ours = Ours(mlp(), transport=Counting())
        train(ours, rank, 3, 24)
        before = ours._reduction.engine.iteration, [p.grad.data_ptr() for p in ours.parameters()]
        train(ours, rank, 3, 24)
        assert before[1] == [p.grad.data_ptr() for p in ours.parameters()]
        assert ours._reduction.engine.iteration == before[0] + 3

    run_ranks(body, 1)


def test_the_trace_keeps_the_latest_events_and_its_capacity():
    trace = _core.Trace(capacity=64)
    trace.measure_record_ns(1000)
    events = trace.events()
    assert len(events) == 64
    assert trace.recorded() == 1000
    assert [e[5] for e in events] == list(range(936, 1000))
    assert all(e[2] <= e[3] for e in events)
    trace.clear()
    assert trace.events() == []


def test_loopback_stands_for_equal_ranks_and_takes_the_time_of_its_link():
    def body(rank, world):
        plain = mlp()
        ours = Ours(copy.deepcopy(plain), transport=_core.LoopbackTransport(4, latency_s=0.002))
        assert ours.transport == "loopback"
        for model in (plain, ours):
            model(batch(0, 0, 4, 24)).square().mean().backward()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        (reduce_0,) = [e for e in ours.trace() if e.kind == "reduce"]
        assert reduce_0.end_ns - reduce_0.begin_ns >= 2e6

    run_ranks(body, 1)


def test_the_wait_for_a_slow_peer_is_in_the_trace_of_the_one_that_waited():
    def body(rank, world):
        ours = Ours(mlp())
        dist.barrier()
        if rank == 1:
            time.sleep(0.8)
        train(ours, rank, 1, 24)
        return sum(e.end_ns - e.begin_ns for e in ours.trace() if e.kind == "wait")

    waited, _ = run_ranks(body, 2)
    assert waited > 2e8


def spoil(param, value, at=-1):
    """From now on the gradient of this parameter holds the value at that place."""

    def hook(grad):
        grad = grad.clone()
        grad.view(-1)[at] = value
        return grad

    param.register_hook(hook)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_the_engine_knows_the_lowest_parameter_whose_own_gradient_was_not_finite(transport):
    def body(rank, world):
        ours = Ours(mlp(), transport=transport)
        ours._reduction.engine.set_check_finite(True)
        train(ours, rank, 1, 24)
        assert ours._reduction.engine.nonfinite_parameter == -1
        if rank == 1:
            params = list(ours.module.parameters())
            spoil(params[4], float("nan"))
            spoil(params[2], float("inf"), at=0)
        train(ours, rank, 1, 24)
        assert not list(ours.parameters())[2].grad.isfinite().all(), "the mean holds it on both ranks"
        return ours._reduction.engine.nonfinite_parameter

    assert run_ranks(body, 2) == [-1, 2]


def test_what_was_not_finite_is_forgotten_when_the_next_iteration_is_armed():
    def body(rank, world):
        ours = Ours(mlp())
        ours._reduction.engine.set_check_finite(True)
        x = batch(rank, 0, 4, 24)
        ours(x * float("inf")).square().mean().backward()
        assert ours._reduction.engine.nonfinite_parameter == 0
        ours.zero_grad()
        ours(x).square().mean().backward()
        assert ours._reduction.engine.nonfinite_parameter == -1

    run_ranks(body, 1)


def test_a_gradient_kept_by_an_unused_parameter_is_looked_at_too():
    def body(rank, world):
        ours = Ours(TwoHeads(), find_unused_parameters=True)
        ours._reduction.engine.set_check_finite(True)
        kept = ours.module.heads[1].bias
        kept.grad = torch.full_like(kept, float("nan"))
        ours(batch(rank, 0, 4, 6), head=0).square().mean().backward()
        return ours._reduction.names[ours._reduction.engine.nonfinite_parameter]

    assert run_ranks(body, 1) == ["heads.1.bias"]


# ---- unpacking


def _engine_of_one_slot(numel, dtype):
    transport = _core.LoopbackTransport(2)
    engine = _core.Engine(transport, _core.InlineStream(), _core.Trace(), 1)
    memory = transport.allocate(numel * dtype.itemsize)
    engine.set_plan([(memory, str(dtype).removeprefix("torch."), numel, [(0, 0, numel)])], 0)
    return engine, memory


def _finish(engine):
    engine.finish(backwards=1, forwards=1, failed=False, joined=False, weight=1.0, nonfinite=-1)
    engine.disarm()


def test_a_gradient_that_travels_in_another_dtype_is_unpacked_where_the_engine_is_told():
    engine, _ = _engine_of_one_slot(1000, torch.bfloat16)
    grad = torch.zeros(1000)
    engine.unpack_to(0, grad)
    values = torch.arange(1000.0)
    for _ in range(2):
        engine.arm()
        engine.complete(0, values)
        assert engine.missing() == []
        _finish(engine)
        assert torch.equal(grad, values.bfloat16().float())  # loopback's ranks are equal
        values = -values


def test_where_a_gradient_is_unpacked_to_may_change_between_iterations():
    engine, _ = _engine_of_one_slot(10, torch.float16)
    old, new = torch.zeros(10), torch.zeros(10)
    engine.unpack_to(0, old)
    engine.unpack_to(0, new)
    engine.arm()
    engine.complete(0, torch.ones(10))
    _finish(engine)
    assert torch.equal(new, torch.ones(10))
    assert torch.equal(old, torch.zeros(10))


def test_a_gradient_of_the_slots_own_dtype_may_lie_beside_it_too():
    engine, _ = _engine_of_one_slot(10, torch.float32)
    beside = torch.zeros(10)
    engine.unpack_to(0, beside)
    engine.arm()
    engine.complete(0, torch.ones(10))
    _finish(engine)
    assert torch.equal(beside, torch.ones(10))


def test_a_gradient_of_another_size_is_not_unpacked_to():
    engine, _ = _engine_of_one_slot(10, torch.bfloat16)
    with pytest.raises(ValueError, match="numel differs"):
        engine.unpack_to(0, torch.zeros(11))
