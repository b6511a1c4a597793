"""DistributedDataParallel against stock DDP, step by step and bit by bit, and what stock gets wrong."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from toys import ConvNet, Recurrent, TiedEmbedding, TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel
TRANSPORTS = ["shm", "c10d"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", [mlp, ConvNet, TiedEmbedding, Recurrent], ids=lambda m: m.__name__)
def test_training_is_bitwise_that_of_stock_on_two_ranks(make, transport):
    def body(rank, world):
        model = make()
        stock = Stock(copy.deepcopy(model))
        ours = Ours(copy.deepcopy(model), transport=transport, bucket_cap_mb=0.0002)
        assert ours.transport == transport
        steps = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (stock, ours)]
        for iteration in range(6):
            x = batch(rank, iteration, 5, 24 if make is mlp else 36)
            losses = []
            for ddp in (stock, ours):
                loss = ddp(x).square().mean()
                loss.backward()
                losses.append(loss)
            assert torch.equal(*losses)
            for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad(set_to_none=iteration % 2 == 0)
            for a, b in zip(stock.module.buffers(), ours.module.buffers(), strict=True):
                assert torch.equal(a, b)
        assert len(ours._reduction.plan.buckets) > 1
        same_on_all_ranks(ours.parameters())

    run_ranks(body, 2)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_gradients_are_the_mean_at_any_world_size_and_bitwise_equal_between_ranks(world):
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        for iteration in range(3):
            expected = mean_gradients(
                ours.module, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world
            )
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, world)


def test_bucket_layouts_give_bitwise_the_same_gradients():
    def body(rank, world):
        grads = []
        for cap in (0.001, 0.01, None):
            ours = Ours(mlp(), bucket_cap_mb=cap)
            for iteration in range(2):
                ours.zero_grad()
                ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            grads.append([p.grad.clone() for p in ours.parameters()])
        for other in grads[1:]:
            assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))

    run_ranks(body, 3)


def test_it_is_torchs_class_with_torchs_arguments_in_torchs_order():
    import inspect

    theirs = list(inspect.signature(Stock.__init__).parameters.values())
    ours = list(inspect.signature(Ours.__init__).parameters.values())[: len(theirs)]
    assert issubclass(Ours, Stock)
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert [p.default for p in ours] == [p.default for p in theirs]


def test_construction_gives_rank_0s_parameters_and_buffers_to_all():
    def body(rank, world):
        model = ConvNet()
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.add_(rank)
        state = torch.random.get_rng_state()
        ours = Ours(model)
        assert torch.equal(state, torch.random.get_rng_state())
        for name, tensor in ConvNet().state_dict().items():
            assert torch.equal(ours.module.state_dict()[name], tensor), name

    run_ranks(body, 3)


def test_buffers_follow_rank_0_in_training_and_no_collective_runs_in_a_lone_evaluation():
    def body(rank, world):
        ours = Ours(ConvNet())
        for iteration in range(3):
            ours(batch(rank, iteration, 5, 36)).sum().backward()
        if rank == 0:
            ours.eval()
            with torch.no_grad():
                ours(batch(rank, 9, 5, 36))  # the others do not come
            ours.train()
        ours(batch(rank, 4, 5, 36)).sum().backward()
        ours.sync_buffers()
        same_on_all_ranks(ours.module.buffers())
        quiet = Ours(ConvNet(), forward_sync_buffers=False)
        quiet(batch(rank, 0, 5, 36)).sum().backward()
        return quiet.module.norm.running_mean.clone()

    first, second = run_ranks(body, 2)
    assert not torch.equal(first, second)


def test_whether_buffers_follow_does_not_depend_on_what_a_version_of_torch_calls_the_setting(monkeypatch):
    monkeypatch.delattr(Stock, "will_sync_module_buffers")  # reads broadcast_buffers before torch had the other name
    monkeypatch.delattr(Stock, "broadcast_buffers", raising=False)

    def body(rank, world):
        means = []
        for wanted in (True, False):
            ours = Ours(ConvNet(), forward_sync_buffers=wanted)
            assert ours.broadcast_buffers is wanted
            ours.module.norm.running_mean.add_(rank)
            ours(batch(0, 0, 5, 36)).sum().backward()
            means.append(ours.module.norm.running_mean.clone())
        return means

    first, second = run_ranks(body, 2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_broadcast_buffers_do_not_count_as_changes_for_autograd():
    def body(rank, world):
        ours = Ours(ConvNet())
        ours.module.norm.running_mean.add_(rank)
        before = [buffer._version for buffer in ours.module.buffers()]
        ours.sync_buffers()
        same_on_all_ranks(ours.module.buffers())
        assert [buffer._version for buffer in ours.module.buffers()] == before

    run_ranks(body, 2)


def test_no_sync_accumulates_locally_and_the_next_backward_reduces_the_sum():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))

        def loss(m, r):
            return sum(m(batch(r, micro, 3, 24)).square().mean() for micro in range(3))

        for _ in range(3):
            ours.zero_grad()
            with ours.no_sync():
                ours(batch(rank, 0, 3, 24)).square().mean().backward()
                local = [p.grad.clone() for p in ours.parameters()]
                ours(batch(rank, 1, 3, 24)).square().mean().backward()
            ours(batch(rank, 2, 3, 24)).square().mean().backward()
            assert_mean(ours, mean_gradients(model, loss, world), 1e-5)
        return local

    first, second = run_ranks(body, 2)
    assert not torch.equal(first[0], second[0])


def test_a_parameter_used_only_in_a_no_sync_micro_batch_is_reduced_with_the_last():
    def body(rank, world):
        model = TwoHeads()
        ours = Ours(copy.deepcopy(model))
        with ours.no_sync():
            ours(batch(rank, 0, 3, 6), 0).square().mean().backward()
        ours(batch(rank, 1, 3, 6), 1).square().mean().backward()

        def loss(m, r):
            return m(batch(r, 0, 3, 6), 0).square().mean() + m(batch(r, 1, 3, 6), 1).square().mean()

        assert_mean(ours, mean_gradients(model, loss, world))
        ours(batch(rank, 2, 3, 6), 0)  # nothing was unused, so nothing is raised

    run_ranks(body, 2)


def test_gradients_that_are_not_zeroed_accumulate_like_stocks():
    def body(rank, world):
        model = mlp()
        stock, ours = Stock(copy.deepcopy(model)), Ours(copy.deepcopy(model))
        for iteration in range(4):
            for ddp in (stock, ours):
                ddp(batch(rank, iteration, 5, 24)).square().mean().backward()
            for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)

    run_ranks(body, 2)


def test_a_gradient_that_the_program_keeps_is_never_overwritten():
    def body(rank, world):
        ours = Ours(mlp())
        kept, copies = [], []
        for iteration in range(4):
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            params = list(ours.parameters())
            kept += [params[0].grad, params[1].grad.view(-1)[1:], params[2].grad.detach()]
            copies += [t.clone() for t in kept[-3:]]
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))

    run_ranks(body, 2)


def test_gradients_lie_in_the_same_memory_iteration_after_iteration():
    def body(rank, world):
        ours = Ours(mlp(), gradient_as_bucket_view=True)
        seen = set()
        for iteration in range(5):
            ours.zero_grad(set_to_none=iteration % 2 == 0)
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            if iteration >= 2:
                seen.add(tuple(p.grad.data_ptr() for p in ours.parameters()))
        assert len(seen) == 1

    run_ranks(body, 2)


def test_an_unused_parameter_is_named_by_the_next_forward_and_the_others_are_reduced():
    def body(rank, world):
        model = TwoHeads()
        ours = Ours(copy.deepcopy(model))
        expected = mean_gradients(model, lambda m, r: m(batch(r, 0, 3, 6), 0).square().mean(), world)
        ours(batch(rank, 0, 3, 6), 0).square().mean().backward()
        assert_mean(ours, expected)
        assert ours.module.heads[1].weight.grad is None
        with pytest.raises(RuntimeError, match=r"(?s)Expected to have finished reduction.*heads\.1\.weight"):
            ours(batch(rank, 1, 3, 6), 0)

    run_ranks(body, 2)


def test_find_unused_parameters_reduces_whatever_subset_each_rank_uses():
    def body(rank, world):
        model = TwoHeads()
        ours = Ours(copy.deepcopy(model), find_unused_parameters=True)
        for iteration, heads in enumerate([(0, 1), (0, 0), (1, 0), (None, 1), (0, 1)]):
            ours.zero_grad()

            def loss(m, r, iteration=iteration, heads=heads):
                return m(batch(r, iteration, 3, 6), heads[r]).square().mean()

            expected = mean_gradients(model, loss, world)
            loss(ours, rank).backward()
            assert_mean(ours, expected)
            for name, param in ours.module.named_parameters():
                if name not in expected:
                    assert param.grad is None, name

    run_ranks(body, 2)


def test_a_globally_unused_parameter_keeps_the_gradient_it_has():
    def body(rank, world):
        ours = Ours(TwoHeads(), find_unused_parameters=True)
        for iteration in range(2):
            ours.zero_grad()
            (ours(batch(rank, iteration, 3, 6), 0).sum() + ours(batch(rank, iteration, 3, 6), 1).sum()).backward()
        kept = ours.module.heads[1].weight
        kept.grad.fill_(rank + 0.25)  # lies in the bucket, differs between ranks
        for head in ours.module.heads[0].parameters():
            head.grad = None
        ours(batch(rank, 2, 3, 6), 0).sum().backward()
        assert torch.equal(kept.grad, torch.full_like(kept, rank + 0.25))

    run_ranks(body, 2)


def test_static_graph_allows_what_is_always_unused_and_raises_when_that_changes():
    def body(rank, world):
        ours = Ours(TwoHeads(), static_graph=True)
        for iteration in range(3):
            with ours.no_sync():
                ours(batch(rank, iteration, 3, 6), 0).sum().backward()
            ours(batch(rank, iteration, 3, 6), 0).sum().backward()
        with pytest.raises(RuntimeError, match=r"training graph has changed.*heads\.0\.weight"):
            ours(batch(rank, 3, 3, 6), 1).sum().backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"(?s)training graph has changed.*heads\.0\.weight"):
                ours(batch(rank, 4, 3, 6), 0)

    run_ranks(body, 2)


def test_forward_through_the_inner_module_is_reduced():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        for iteration in range(2):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world)
            ours.module(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)
        ours.zero_grad()
        with ours.no_sync():
            ours.module(batch(rank, 5, 5, 24)).square().mean().backward()
        return next(ours.parameters()).grad.clone()

    first, second = run_ranks(body, 2)
    assert not torch.equal(first, second)


def test_expanded_buffers_get_rank_0s_values():
    class Buffered(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("row", torch.arange(value, value + 4.0).expand(3, 4))
            self.register_buffer("scalar", torch.tensor(value).expand(2, 5))
            self.register_buffer("column", torch.arange(value, value + 3.0).view(3, 1).expand(3, 6))

        def forward(self, x):
            return (x * self.weight).sum()

    def body(rank, world):
        ours = Ours(Buffered(10.0 * rank))
        for change in (0.0, 1.0):
            with torch.no_grad():
                ours.module.row[0].add_(change * rank)
            ours(batch(rank, 0, 3)).backward()
            assert torch.equal(ours.module.row, torch.arange(4.0).expand(3, 4))
            assert torch.equal(ours.module.scalar, torch.zeros(2, 5))
            assert torch.equal(ours.module.column, torch.arange(3.0).view(3, 1).expand(3, 6))
            assert ours.module.row.stride() == (0, 1)

    run_ranks(body, 2)


def test_the_work_of_wrapping_grows_with_the_number_of_parameters_and_no_faster():
    def lines_of_wrapping(count):
        module = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(10)) for _ in range(count // 10)
        )
        lines = 0

        def trace(frame, event, _):
            nonlocal lines
            if "gpucomm" not in frame.f_code.co_filename:
                return None
            lines += event == "line"
            return trace

        sys.settrace(trace)
        try:
            Ours(module, bucket_cap_mb=0.00001)
        finally:
            sys.settrace(None)
        return lines

    def body(rank, world):
        lines_of_wrapping(10)  # what the first construction does once
        few, many = lines_of_wrapping(750), lines_of_wrapping(3000)
        assert many < 4.5 * few, (few, many)

    run_ranks(body, 1)


def test_a_forward_under_no_sync_after_one_to_be_reduced_does_not_cancel_its_reduction():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))

        def parts(m, r):
            return m(batch(r, 0, 5, 24)).square().mean(), m(batch(r, 1, 5, 24)).mean()

        expected = mean_gradients(model, lambda m, r: sum(parts(m, r)), world)
        reduced = ours(batch(rank, 0, 5, 24)).square().mean()
        with ours.no_sync():
            ours(batch(rank, 1, 5, 24)).mean().backward()
        reduced.backward()
        assert_mean(ours, expected)

    run_ranks(body, 2)


def test_mixed_dtypes_complex_and_empty_parameters_keep_theirs():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.single_ = nn.Parameter(torch.randn(3, 5))
            self.double_ = nn.Parameter(torch.randn(7, dtype=torch.float64))
            self.half_ = nn.Parameter(torch.randn(9, dtype=torch.bfloat16))
            self.complex_ = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
            self.empty_ = nn.Parameter(torch.empty(0, 3))
            self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.transposed = nn.Parameter(torch.randn(4, 6).t())
            self.scalar = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            parts = [(p.double() if not p.is_complex() else p).abs().pow(3).sum() for p in self.parameters()]
            return sum(part * x.sum().double() for part in parts)

    def body(rank, world):
        model = Odd()
        ours = Ours(copy.deepcopy(model))
        for iteration in range(3):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 3)), world)
            ours(batch(rank, iteration, 3)).backward()
            for name, param in ours.module.named_parameters():
                assert param.grad.dtype == param.dtype, name
                assert param.grad.stride() == param.stride(), name
                tolerance = 1e-2 if param.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(param.grad, expected[name], rtol=tolerance, atol=tolerance, msg=name)

    run_ranks(body, 2)


def test_state_dict_has_torchs_names_and_loads_back():
    def body(rank, world):
        ours = Ours(mlp())
        state = ours.state_dict()
        assert list(state) == list(Stock(mlp()).state_dict())
        ours.module[0].weight.data.zero_()
        ours.load_state_dict(state)
        ours.module.load_state_dict(mlp().state_dict())

    run_ranks(body, 2)


def test_a_group_of_some_ranks_reduces_among_them():
    def body(rank, world):
        group = dist.new_group([0, 2])
        if rank == 1:
            return None
        model = mlp()
        ours = Ours(copy.deepcopy(model), process_group=group)
        expected = {}
        for r in (0, 2):
            replica = copy.deepcopy(model)
            replica(batch(r, 0, 5, 24)).square().mean().backward()
            for name, param in replica.named_parameters():
                expected[name] = expected.get(name, 0) + param.grad / 2
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        assert_mean(ours, expected)
        return ours.transport

    assert run_ranks(body, 3) == ["shm", None, "shm"]


def test_one_rank_trains_bitwise_like_the_plain_module():
    def body(rank, world):
        plain = mlp()
        ours = Ours(copy.deepcopy(plain))
        for iteration in range(3):
            for model in (plain, ours):
                model.zero_grad()
                model(batch(0, iteration, 5, 24)).square().mean().backward()
            for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)

    run_ranks(body, 1)


def test_a_module_without_trainable_parameters_is_refused():
    def body(rank, world):
        with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
            Ours(mlp().requires_grad_(False))

    run_ranks(body, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_a_torchscript_module_trains_as_with_stock(kind):
    def body(rank, world):
        x = batch(rank, 0, 5, 24)

        def build():
            return torch.jit.script(mlp()) if kind == "script" else torch.jit.trace(mlp(), x)

        ours, stock = Ours(build()), Stock(build())
        stock.load_state_dict(ours.state_dict())
        for iteration in range(3):
            for ddp in (ours, stock):
                ddp.zero_grad()
                ddp(batch(rank, iteration, 5, 24)).square().mean().backward()
            for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)  # its executor may fuse, or not yet

    run_ranks(body, 2)
