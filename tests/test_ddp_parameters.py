"""DistributedDataParallel when parameters change after wrapping: frozen, moved, replaced, shared between wrappers."""

import copy
import warnings

import pytest
import torch
from gradients import assert_mean, mean_gradients, same_on_all_ranks
from ranks import run_ranks
from torch import nn
from toys import batch, mlp

from gpucomm import DistributedDataParallel as Ours
from gpucomm import StepFailed
from gpucomm.reduction.second_round import SecondRound

Stock = nn.parallel.DistributedDataParallel


def test_a_parameter_unfrozen_after_wrapping_is_reduced_and_gets_a_slot():
    def body(rank, world):
        model = mlp()
        model[0].weight.requires_grad_(False)
        ours = Ours(copy.deepcopy(model))
        for iteration in range(4):
            if iteration == 1:
                ours.module[0].weight.requires_grad_(True)
                model[0].weight.requires_grad_(True)
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world)
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)
        return 0 in ours._reduction.plan.parameters

    assert run_ranks(body, 2) == [True, True]


def test_a_parameter_frozen_after_wrapping_is_no_error():
    def body(rank, world):
        ours = Ours(mlp())
        for iteration in range(3):
            ours.module[0].weight.requires_grad_(iteration == 0)
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert (ours.module[0].weight.grad is not None) == (iteration == 0)

    run_ranks(body, 2)


def test_moves_to_another_dtype_and_back_are_reduced():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        for iteration, dtype in enumerate([torch.float32, torch.float64, torch.float64, torch.float32, torch.float32]):
            ours.to(dtype)
            model.to(dtype)
            ours.zero_grad()
            x = [batch(r, iteration, 5, 24).to(dtype) for r in range(world)]
            expected = mean_gradients(model, lambda m, r, x=x: m(x[r]).square().mean(), world)
            ours(x[rank]).square().mean().backward()
            assert_mean(ours, expected)
        # Gradients kept through the round trip: their tensors are moved by to() as well.
        ours.double()
        ours.float()
        ours(batch(rank, 5, 5, 24)).square().mean().backward()
        same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


@pytest.mark.parametrize("period", [1, 2])
def test_conversions_between_the_making_of_a_plan_and_its_use_are_reduced(period):
    """A plan is made at the end of one iteration, for the parameters as they are then, and used in the next."""
    changes = [
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: m.float(),
        lambda m: m[0].weight.requires_grad_(True),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().repeat(2, 1))),
        lambda m: m.bfloat16(),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach()[:24].clone())),
        lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().t())),
        lambda m: m.float(),
        lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().reshape(12, 48))),
        lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().view(24, 24).to(torch.complex64))),
        lambda m: m.double(),
    ]

    def loss(m, r, iteration):
        x = batch(r, iteration, 5, 24)
        parts = [(x.mean().to(p.real.dtype) * p.abs().pow(2)).sum().double() for p in m.parameters() if p.requires_grad]
        return sum(parts) / 100

    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a complex parameter that becomes a real one
            for iteration in range(period * len(changes) + 3):
                if iteration > 0 and iteration % period == 0 and iteration // period <= len(changes):
                    for m in (model, ours.module):
                        changes[iteration // period - 1](m)
                ours.zero_grad()
                model.load_state_dict(ours.module.state_dict())
                expected = mean_gradients(model, lambda m, r, i=iteration: loss(m, r, i), world)
                with ours._inside_ddp_forward():
                    loss(ours.module, rank, iteration).backward()
                for name, param in ours.module.named_parameters():
                    if name in expected:
                        tolerance = 1e-6 if param.dtype.itemsize > 2 else 1e-2
                        torch.testing.assert_close(param.grad, expected[name], rtol=tolerance, atol=tolerance, msg=name)
                        assert param.grad.dtype == param.dtype
        # The plan followed the last change: nothing has to go around the buckets any more.
        slots = {s.parameter: b.dtype for b in ours._reduction.plan.buckets for s in b.slots}
        complex_one = ours._reduction.names.index("2.weight")  # double() leaves it as it is
        assert slots == {i: "float32" if i == complex_one else "float64" for i in range(8)}
        assert ours._reduction.slots.next_plan is None

    run_ranks(body, 2)


def test_a_parameter_of_another_shape_and_the_same_size_gets_a_slot_that_fits(monkeypatch):
    added = []
    add = SecondRound.add
    monkeypatch.setattr(SecondRound, "add", lambda self, i, grad: added.append(i) or add(self, i, grad))

    def body(rank, world):
        ours = Ours(nn.ParameterList([nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(2))]))
        for iteration in range(4):
            if iteration == 1:
                ours.module[0] = nn.Parameter(torch.ones(6, 4))
            ours.zero_grad()
            sum(p.pow(2).sum() * (rank + 1) for p in ours.module).backward()
            assert torch.equal(ours.module[0].grad, torch.full_like(ours.module[0], 3.0))
        return added

    assert run_ranks(body, 2) == [[0], [0]]  # around the slot once, in the iteration of the change


def test_a_parameter_that_is_replaced_after_wrapping_is_reduced():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        replacements = [
            lambda m: m.load_state_dict({k: v + 0.5 for k, v in m.state_dict().items()}, assign=True),
            lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 2)),
            lambda m: m.__setitem__(2, copy.deepcopy(m[4])),
            lambda m: setattr(m[2], "bias", nn.Parameter(m[2].bias.detach().double().float())),
        ]
        for iteration, replace in enumerate(replacements):
            for m in (model, ours.module):
                replace(m)
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world)
            # The first time around the wrapper, as scripts do that call a method of the module.
            (ours.module if iteration == 1 else ours)(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)
        ours.module[0].extra = nn.Parameter(torch.ones(1))
        ours.module[2] = nn.Sequential(ours.module[2])
        with pytest.raises(RuntimeError, match=r"parameter '.*' was added to the module after it was wrapped"):
            ours(batch(rank, 9, 5, 24))

    run_ranks(body, 2)


@pytest.mark.parametrize(
    "setting", ["set_swap_module_params_on_conversion", "set_overwrite_module_params_on_conversion"]
)
def test_conversions_that_swap_or_overwrite_the_parameters_keep_them_reduced(setting):
    def body(rank, world):
        getattr(torch.__future__, setting)(True)
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        for iteration, dtype in enumerate([torch.float32, torch.float64, torch.float64, torch.float32, torch.float32]):
            ours.zero_grad(set_to_none=True)  # swapping refuses a parameter with a gradient that something else holds
            ours.to(dtype)
            model.to(dtype)
            x = [batch(r, iteration, 5, 24).to(dtype) for r in range(world)]
            expected = mean_gradients(model, lambda m, r, x=x: m(x[r]).square().mean(), world)
            ours(x[rank]).square().mean().backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_parameter_registered_in_a_layer_after_wrapping_raises_by_name():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (x @ self.lora_a.t()) @ self.lora_b.t()

    def body(rank, world):
        layer = Adapted(4, 4)
        ours = Ours(nn.Sequential(layer))
        layer.register_parameter("lora_a", nn.Parameter(torch.ones(2, 4)))
        layer.register_parameter("lora_b", nn.Parameter(torch.ones(4, 2)))
        added = r"parameter '0\.lora_a' was added to the module after it was wrapped"
        with pytest.raises(RuntimeError, match=added):
            ours(batch(rank, 0, 3, 4))
        with pytest.raises(RuntimeError, match=added):
            ours.module(batch(rank, 0, 3, 4)).sum().backward()

    run_ranks(body, 2)


def test_a_frozen_network_added_after_wrapping_is_none_of_ours_until_it_is_unfrozen():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x)

    def body(rank, world):
        ours = Ours(Student())
        teacher = mlp().requires_grad_(False)
        ours.module.teacher = teacher
        x = batch(rank, 0, 5, 24)
        for _ in range(2):
            ours.zero_grad()
            (ours(x) - teacher(x)).square().mean().backward()
        assert all(p.grad is None for p in teacher.parameters())
        same_on_all_ranks(p.grad for p in ours.parameters() if p.grad is not None)
        teacher[2].bias.requires_grad_()
        with pytest.raises(RuntimeError, match=r"parameter 'teacher\.2\.bias' was added to the module after it was"):
            ours(x)
        del ours.module.teacher
        ours(x).square().mean().backward()

    run_ranks(body, 2)


def test_a_parameter_that_one_rank_alone_added_fails_its_peers_at_once():
    def body(rank, world):
        ours = Ours(mlp())
        loss = ours.module(batch(rank, 0, 3, 24)).sum()
        if rank == 1:
            ours.module[0].register_parameter("added", nn.Parameter(torch.ones(2)))
        expected = r"parameter '0\.added' was added" if rank == 1 else "rank 1"
        with pytest.raises(RuntimeError if rank == 1 else StepFailed, match=expected):
            loss.backward()
        if rank == 1:
            del ours.module[0].added
        expected = mean_gradients(ours.module, lambda m, r: m(batch(r, 1, 3, 24)).sum(), world)
        ours(batch(rank, 1, 3, 24)).sum().backward()
        assert_mean(ours, expected, 1e-5)

    run_ranks(body, 2)


def test_functional_call_through_the_wrapper_and_of_its_module_leaves_training_as_it_was():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        others = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
        inner = {name.removeprefix("module."): p for name, p in others.items()}
        x = batch(rank, 0, 5, 24)
        for iteration in range(3):
            local = torch.func.functional_call(ours, others, (x,)).square().mean()
            again = torch.func.functional_call(ours.module, inner, (x,)).square().mean()
            assert torch.equal(local, model(x).square().mean())
            assert torch.equal(local, again)
            for p in others.values():
                p.grad = None
            local.backward()  # through tensors that are not the module's: theirs is the local gradient
            model.zero_grad()
            model(x).square().mean().backward()
            for p, own in zip(others.values(), model.parameters(), strict=True):
                assert torch.equal(p.grad, own.grad)
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world)
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_parameter_frozen_on_one_rank_only_is_an_error_on_all():
    def body(rank, world):
        ours = Ours(mlp())
        ours(batch(rank, 0, 5, 24)).square().mean().backward()
        ours.module[0].weight.requires_grad_(rank == 0)
        ours(batch(rank, 1, 5, 24)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"did not receive grad.*0\.weight"):
            ours(batch(rank, 2, 5, 24))

    run_ranks(body, 2)


def test_an_object_put_past_torchs_registration_is_reduced():
    def body(rank, world):
        model = mlp()
        ours = Ours(copy.deepcopy(model))
        for m in (model, ours.module):
            m[0]._parameters["weight"] = nn.Parameter(m[0].weight.detach() * 2)
        for iteration in range(2):
            ours.zero_grad()
            expected = mean_gradients(model, lambda m, r, i=iteration: m(batch(r, i, 5, 24)).square().mean(), world)
            ours(batch(rank, iteration, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)

    run_ranks(body, 2)


def test_a_gradient_of_a_wrapper_that_another_one_took_over_from_is_never_left_local():
    def body(rank, world):
        shared, head = nn.Linear(4, 4), nn.Linear(4, 4)
        first, second = Ours(nn.Sequential(shared, head)), Ours(shared)
        loss = first(batch(rank, 0, 3, 4)).sum()
        second(batch(rank, 0, 3, 4))
        with pytest.raises(RuntimeError, match=r"parameter '1\..*' got a gradient, but another wrapper"):
            loss.backward()

    run_ranks(body, 2)


def test_a_new_wrapper_around_the_same_module_takes_over():
    def body(rank, world):
        model = mlp()
        first = Ours(model)
        first(batch(rank, 0, 5, 24)).square().mean().backward()
        second = Ours(model)
        model.zero_grad()
        expected = mean_gradients(model, lambda m, r: m(batch(r, 1, 5, 24)).square().mean(), world)
        second(batch(rank, 1, 5, 24)).square().mean().backward()
        assert_mean(second, expected)
        del first, second
        model.zero_grad()
        model(batch(rank, 2, 5, 24)).square().mean().backward()
        return model[0].weight.grad.clone()

    first, second = run_ranks(body, 2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("change", [torch.Tensor.t_, lambda grad: grad.as_strided_((24, 24), (1, 24))])
def test_a_gradient_whose_layout_is_changed_in_place_is_right_again_in_the_next_iteration(change):
    def body(rank, world):
        model = nn.Linear(24, 24)
        ours = Ours(copy.deepcopy(model))
        expected = mean_gradients(model, lambda m, r: m(batch(r, 0, 5, 24)).square().mean(), world)
        for _ in range(3):
            ours.zero_grad()
            ours(batch(rank, 0, 5, 24)).square().mean().backward()
            assert_mean(ours, expected)
            change(ours.module.weight.grad)

    run_ranks(body, 2)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and later have grad_dtype")
def test_gradients_are_of_the_dtype_that_the_parameter_asks_for():
    def body(rank, world):
        ours = Ours(mlp().bfloat16())
        for param in ours.parameters():
            param.grad_dtype = torch.float32
        ours = Ours(ours.module)
        for iteration in range(3):
            ours.zero_grad()
            ours(batch(rank, iteration, 5, 24).bfloat16()).square().mean().backward()
            assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}
            same_on_all_ranks(p.grad for p in ours.parameters())

    run_ranks(body, 2)


def test_a_hook_of_the_program_that_returns_a_value_is_named_as_the_cause():
    def body(rank, world):
        model = mlp()
        model[0].weight.register_post_accumulate_grad_hook(torch.zeros_like)
        ours = Ours(model)
        with pytest.raises(RuntimeError, match=r"'0\.weight': a post-accumulate-grad hook of the program returned a"):
            ours(batch(rank, 0, 5, 24)).square().mean().backward()

    run_ranks(body, 1)
