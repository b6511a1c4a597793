"""What programs call and override on torch's wrapper and its reducer, beyond forward and backward."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from expect import raises
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from toys import ConvNet, TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel
TRANSPORTS = ["shm", "c10d"]
MEMBERS = """
    module forward train no_sync join join_hook join_device join_process_group register_comm_hook
    will_sync_module_buffers scatter gather to_kwargs broadcast_buffers forward_sync_buffers device device_ids
    output_device device_type dim static_graph find_unused_parameters gradient_as_bucket_view batched_grad_copy
    process_group mixed_precision parameters_to_ignore modules_buffers named_module_buffers is_multi_device_module
    require_backward_grad_sync require_forward_param_sync reducer logger
    _register_builtin_comm_hook _register_fused_optim _register_buffer_comm_hook _set_static_graph
    _get_ddp_logging_data _set_ddp_runtime_logging_sample_rate _set_params_and_buffers_to_ignore_for_model
    _get_data_parallel_params _remove_autograd_hooks _check_reducer_finalized _set_sparse_metadata
    _update_process_group _set_ddp_sink_clone _sync_buffers _sync_module_buffers _distributed_rank
    _get_active_ddp_module _inside_ddp_forward _run_ddp_forward _pre_forward _post_forward _lazy_init
    _module_parameters _build_params_for_reducer _build_debug_param_to_name_mapping _has_rebuilt_buckets _comm_hooks
    bucket_bytes_cap bucket_bytes_cap_default _delay_all_reduce_params
"""


def loss_of(model, rank, iteration=0):
    return model(batch(rank, iteration, 5, 24)).square().mean()


def test_every_member_that_programs_know_is_there():
    def body(rank, world):
        ours, stock = Ours(mlp()), Stock(mlp())
        for name in MEMBERS.split():
            assert hasattr(ours, name), name
            if name.startswith("_") or not hasattr(stock, name):
                continue
            mine, theirs = getattr(ours, name), getattr(stock, name)
            if isinstance(theirs, (bool, int, str, set, type(None), torch.device)):
                assert mine == theirs, name

    run_ranks(body, 1)


def test_every_method_of_torchs_reducer_and_logger_is_there():
    def body(rank, world):
        ours = Ours(mlp())
        served = {"_set_mixed_precision_param_dtype"}  # with mixed precision
        for mine, theirs in ((ours.reducer, dist.Reducer), (ours.logger, dist.Logger)):
            names = {name for name in dir(theirs) if not name.startswith("__") and "pybind11" not in name} - served
            assert {name for name in names if not hasattr(mine, name)} == set()

    run_ranks(body, 1)


# ---- the reducer


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prepare_for_backward_has_a_backward_reduced_whose_forward_ran_under_no_sync(transport):
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model), transport=transport)
        with ours.no_sync():
            losses = [loss_of(ours, rank, iteration) for iteration in range(3)]
            losses[0].backward()
        losses[1].backward()
        assert ours._reduction.engine.iteration == 0
        ours.reducer.prepare_for_backward(list(losses[2:]))
        losses[2].backward()
        assert_mean(ours, mean_gradients(model, lambda m, r: sum(loss_of(m, r, i) for i in range(3)), world))
        same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_prepare_for_backward_serves_a_forward_past_the_wrapper_inside_no_sync():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        with ours.no_sync():
            ours.reducer.prepare_for_backward([])
            loss_of(ours.module, rank).backward()
        assert_mean(ours, mean_gradients(model, loss_of, world))
        with ours.no_sync():
            loss_of(ours, rank, 1).backward()  # said for one backward only
        assert ours._reduction.engine.iteration == 1

    run_ranks(body, 2)


def test_rebuild_buckets_is_true_once_after_the_order_was_learned():
    def body(rank, world):
        ours = Ours(mlp())
        answers = []
        for iteration in range(3):
            answers.append(ours.reducer._rebuild_buckets())
            loss_of(ours, rank, iteration).backward()
        return answers

    assert run_ranks(body, 2) == [[False, True, False]] * 2


def test_the_used_map_counts_the_ranks_that_used_a_parameter():
    def body(rank, world):
        model = TwoHeads()
        model.body.bias.requires_grad_(False)  # not numbered
        ours = Ours(model, find_unused_parameters=True)
        ours(batch(rank, 0, 3, 6), int(rank == 0)).sum().backward()
        used = ours.reducer._get_local_used_map()
        assert used.dtype == torch.int32
        assert used.tolist() == [3, 2, 2, 1, 1]

    run_ranks(body, 3)


def test_after_the_hooks_are_removed_gradients_stay_local_and_another_wrapper_can_take_over():
    def body(rank, world):
        model = mlp()
        reference = copy.deepcopy(model)
        first = Ours(model)
        first._remove_autograd_hooks()
        loss_of(first, rank).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            loss_of(reference, rank).backward() if q.grad is None else None
            torch.testing.assert_close(p.grad, q.grad)
        reference.zero_grad()
        model.zero_grad()
        second = Ours(model)
        loss_of(second, rank).backward()
        assert_mean(second, mean_gradients(reference, loss_of, world))

    run_ranks(body, 2)


def test_an_iteration_that_was_not_reduced_as_it_should_be_is_found_by_check_reducer_finalized():
    def body(rank, world):
        ours = Ours(TwoHeads())
        ours._check_reducer_finalized()
        ours(batch(rank, 0, 3, 6), 0).sum().backward()
        raises(RuntimeError, "Expected to have finished reduction", ours._check_reducer_finalized)
        complete = Ours(mlp())
        loss_of(complete, rank).backward()
        complete._check_reducer_finalized()

    run_ranks(body, 2)


def test_an_installed_future_is_waited_for_when_backward_ends():
    def body(rank, world):
        ours = Ours(mlp())
        value = torch.full((1,), rank + 1.0)
        future = dist.all_reduce(value, async_op=True).get_future()
        loss = loss_of(ours, rank)
        ours.reducer._install_post_backward_futures([future])
        loss.backward()
        assert future.done()
        assert value.item() == 3.0
        failed = torch.futures.Future()
        failed.set_exception(ValueError("not today"))
        loss = loss_of(ours, rank, 1)
        ours.reducer._install_post_backward_futures([failed])
        raises(Exception, "not today", loss.backward)
        loss_of(ours, rank, 2).backward()

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buckets_of_zeros_go_through_the_communication_hook_in_the_callers_place(transport):
    def body(rank, world):
        ours = Ours(mlp(), bucket_cap_mb=0, transport=transport)
        buckets = ours.reducer._get_zeros_like_grad_buckets()
        assert [b.index() for b in buckets] == list(range(8))
        assert [b.is_last() for b in buckets] == [False] * 7 + [True]
        assert [p for b in buckets for p in b.parameters()] == [
            ours._reduction.params[i] for i in ours._reduction.plan.parameters
        ]
        for bucket in buckets:
            assert not bucket.buffer().any()
            bucket.gradients()[0].fill_(rank + 1.0)
            summed = ours.reducer._run_allreduce_hook(bucket).wait()
            assert summed.max() == 3.0
            assert torch.equal(bucket.gradients()[0], torch.full_like(bucket.parameters()[0], 3.0))
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
        loss_of(ours, rank).backward()
        for bucket in ours.reducer._get_zeros_like_grad_buckets():
            bucket.buffer().fill_(rank + 1.0)
            assert torch.equal(ours.reducer._run_comm_hook(bucket).wait(), torch.full_like(bucket.buffer(), 1.5))

    run_ranks(body, 2)


def test_a_static_graph_is_declared_before_the_first_iteration_or_not_at_all():
    def body(rank, world):
        ours = Ours(mlp())
        loss_of(ours, rank).backward()
        raises(RuntimeError, "should be called before training loop starts", ours._set_static_graph)
        assert not ours.static_graph
        assert "before training loop starts" in ours._get_ddp_logging_data()["error"]
        early = Ours(TwoHeads())
        early._set_static_graph()
        for iteration in range(3):
            early(batch(rank, iteration, 3, 6), 0).sum().backward()  # unused parameters are no error

    run_ranks(body, 2)


def test_the_hook_of_a_parameter_can_be_called_by_its_number():
    def body(rank, world):
        ours = Ours(nn.Linear(3, 1, bias=False))
        weight = ours.module.weight
        x = torch.full((1, 3), rank + 1.0, requires_grad=True)

        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sum()

            @staticmethod
            def backward(ctx, grad):
                weight.grad = torch.full_like(weight, rank + 1.0)
                ours.reducer._autograd_hook(0)
                return torch.ones(1, 3)

        Backward.apply(x).backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 1.5))

    run_ranks(body, 2)


def test_optimizers_that_step_in_backward_step_on_the_mean():
    def body(rank, world):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it compiles TorchScript
            from torch.distributed.optim import _apply_optimizer_in_backward
        model = mlp()
        reference = copy.deepcopy(model)
        step = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
        ours = Ours(model)
        for iteration in range(3):
            with ours.no_sync():
                loss_of(ours, rank, 2 * iteration).backward()
            loss_of(ours, rank, 2 * iteration + 1).backward()
            assert all(p.grad is None for p in ours.parameters())
            grads = mean_gradients(
                reference, lambda m, r, i=iteration: loss_of(m, r, 2 * i) + loss_of(m, r, 2 * i + 1), world
            )
            for name, p in reference.named_parameters():
                p.grad = grads[name]
            step.step()
            for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p, q)
        same_on_all_ranks(ours.parameters())

    run_ranks(body, 2)


# ---- the wrapper


def test_ignored_parameters_and_buffers_are_left_alone():
    def body(rank, world):
        model = ConvNet()
        ignored = ["head.weight", "norm.running_mean"]
        Stock._set_params_and_buffers_to_ignore_for_model(model, ignored)
        model.head.weight.data.fill_(rank)
        model.norm.running_mean.fill_(rank)
        ours = Ours(model)
        assert ours.parameters_to_ignore == set(ignored)
        assert "norm.running_mean" not in ours.named_module_buffers
        assert (model.head.weight == rank).all()
        ours.eval()
        ours(batch(rank, 0, 5, 36)).square().sum().backward()
        assert (model.norm.running_mean == rank).all()
        gathered = [torch.empty_like(model.head.weight) for _ in range(world)]
        dist.all_gather(gathered, model.head.weight.grad)
        assert not torch.equal(*gathered)
        managed = list(ours._get_data_parallel_params(model))
        assert set(managed) == set(model.parameters()) - {model.head.weight}
        same_on_all_ranks(p.grad for p in managed)

    run_ranks(body, 2)


@pytest.mark.parametrize("skips", [False, True])
def test_always_unused_parameters_need_not_be_reduced(skips):
    def body(rank, world):
        model = TwoHeads()
        ours = Ours(
            copy.deepcopy(model), find_unused_parameters=True, skip_all_reduce_unused_params=skips, bucket_cap_mb=0
        )
        for iteration, head in enumerate([0, 0, 1, 0]):
            ours.zero_grad()

            def loss(m, r, iteration=iteration, head=head):
                return m(batch(r, iteration, 3, 6), head).square().mean()

            expected = mean_gradients(model, loss, world)
            loss(ours, rank).backward()
            assert_mean(ours, expected)  # though unused before, the other head is reduced once it is used
            assert ours.module.heads[1 - head].weight.grad is None
            if iteration == 1:
                assert ours._get_ddp_logging_data()["num_buckets_reduced"] == (4 if skips else 6)

    run_ranks(body, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("which", ["some", "all"])
def test_delayed_parameters_are_reduced_together_after_all_others(which, transport):
    def body(rank, world):
        model = mlp()
        for p in model.parameters():
            p.data.add_(rank)
        delayed = [(n, p) for n, p in model.named_parameters() if which == "all" or n.startswith("0")]
        ours = Ours(
            model,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=delayed[0][1],
            bucket_cap_mb=0,
            transport=transport,
        )
        assert ours._delay_all_reduce_params == [p for _, p in delayed]
        same_on_all_ranks(ours.parameters())
        reference = copy.deepcopy(model)
        for iteration in range(3):
            ours.zero_grad()
            expected = mean_gradients(reference, lambda m, r, i=iteration: loss_of(m, r, i), world)
            loss_of(ours, rank, iteration).backward()
            assert_mean(ours, expected)
            last = ours._reduction.plan.buckets[-1]
            assert len(last.slots) == len(delayed)
        assert len(ours._reduction.plan.buckets) == 8 - len(delayed) + 1

    run_ranks(body, 2)


def test_a_delayed_parameter_that_is_not_used_is_no_error():
    def body(rank, world):
        model = TwoHeads()
        delayed = [(f"heads.1.{n}", p) for n, p in model.heads[1].named_parameters()]
        ours = Ours(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.body.weight)
        for iteration in range(2):
            ours(batch(rank, iteration, 3, 6), 0).sum().backward()

    run_ranks(body, 2)


def test_a_name_of_another_parameter_is_refused_for_a_delayed_one():
    def body(rank, world):
        model = mlp()
        arguments = {"delay_all_reduce_named_params": [("0.weight", model[2].weight)]}
        raises(
            ValueError,
            "delay_all_reduce_named_params.*'0.weight'",
            lambda: Ours(model, param_to_hook_all_reduce=model[0].weight, **arguments),
        )

    run_ranks(body, 1)


class Overriding(Ours):
    """As frameworks do it: everything around the module's forward is theirs."""

    def __init__(self, module, **arguments):
        super().__init__(module, **arguments)
        self.calls = []

    def to_kwargs(self, inputs, kwargs, device_id):
        self.calls.append("to_kwargs")
        return self.scatter(inputs, kwargs, [device_id])

    def scatter(self, inputs, kwargs, device_ids):
        self.calls.append("scatter")
        return (inputs,), (kwargs,)

    def _run_ddp_forward(self, *inputs, **kwargs):
        self.calls.append("_run_ddp_forward")
        inputs, kwargs = self.to_kwargs(inputs, kwargs, torch.device("cpu"))
        return self.module(*inputs[0], **kwargs[0])

    def train_step(self, rank, iteration):
        """Without the wrapper's forward."""
        if self.reducer._rebuild_buckets():
            self.calls.append("rebuilt")
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        output = loss_of(self.module, rank, iteration)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.prepare_for_backward([] if not self.find_unused_parameters else [output])
        else:
            self.require_forward_param_sync = False
        return output


def test_a_subclass_that_overrides_what_surrounds_the_forward_is_reduced():
    def body(rank, world):
        model = mlp()
        theirs = Overriding(copy.deepcopy(model))
        loss_of(theirs, rank).backward()
        assert theirs.calls == ["_run_ddp_forward", "to_kwargs", "scatter"]
        assert_mean(theirs, mean_gradients(model, loss_of, world))
        theirs.zero_grad()
        theirs.train_step(rank, 1).backward()
        assert theirs.calls[-1] == "rebuilt"
        assert_mean(theirs, mean_gradients(model, lambda m, r: loss_of(m, r, 1), world))

    run_ranks(body, 2)


class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = None

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return self.weight


def test_with_device_ids_inputs_go_through_to_kwargs():
    class Moves(Ours):
        def to_kwargs(self, inputs, kwargs, device_id):
            assert device_id == 0
            return (tuple(x + 1 for x in inputs),), ({name: x + 2 for name, x in kwargs.items()},)

    def body(rank, world):
        ours = Moves(Passes())
        ours.device_ids = [0]  # as for a module on a GPU
        ours(torch.zeros(1), y=torch.zeros(1))
        (args, kwargs) = ours.module.seen
        assert args[0] == 1
        assert kwargs["y"] == 2

    run_ranks(body, 1)


def test_inputs_reach_the_module_untouched():
    class Thing:
        pass

    def body(rank, world):
        ours = Ours(Passes())
        args = (torch.ones(2), [torch.ones(3)], Thing(), None, "text")
        kwargs = {"x": {"y": torch.ones(1)}, "z": Thing()}
        ours(*args, **kwargs)
        assert all(a is b for a, b in zip(ours.module.seen[0], args, strict=True))
        assert all(ours.module.seen[1][name] is value for name, value in kwargs.items())

    run_ranks(body, 1)


@pytest.mark.parametrize("swapped", [False, True])
def test_during_its_forward_a_wrapper_is_the_active_one_where_the_compiler_looks(swapped, monkeypatch):
    if swapped:
        monkeypatch.setattr("torch.nn.parallel.distributed.DistributedDataParallel", Ours)

    class Looks(nn.Module):
        def __init__(self, inner=None):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.inner = inner

        def forward(self, x):
            if self.inner is not None:
                x = self.inner(x)
            seen.append((Stock._get_active_ddp_module(), Ours._get_active_ddp_module()))
            return self.layer(x)

    seen = []

    def body(rank, world):
        inner = Ours(Looks())
        outer = Ours(Looks(inner))
        outer(torch.ones(1, 2))
        assert [a is b for a, b in seen] == [True, True]
        assert [active for active, _ in seen] == [inner, outer]
        assert Stock._get_active_ddp_module() is Ours._get_active_ddp_module() is None

    run_ranks(body, 1)


def test_training_mode_can_be_set_as_on_any_module():
    def body(rank, world):
        ours = Ours(mlp())
        assert ours.eval() is ours
        assert not ours.module.training
        assert ours.train() is ours
        assert ours.module[0].training

    run_ranks(body, 1)
