"""The optimizers as torch's: groups, closures, schedulers, hooks, GradScaler, autograd's version counters."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from test_optim import OPTIMIZERS, TORCH, give_gradients, parameters, train

from gpucomm.optim import LAMB, SGD, Adam, AdamW, Lion

by_name = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
with_torch = pytest.mark.parametrize("cls", TORCH, ids=lambda cls: cls.__name__)


def equal(params, others):
    return all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@with_torch
def test_arguments_and_defaults_are_torchs(cls):
    import inspect

    ours, theirs = (inspect.signature(each.__init__).parameters for each in (cls, TORCH[cls]))
    own = {"master_weights", "stochastic_rounding", "rounding_seed", "zero_grad_in_step"}
    assert set(ours) - set(theirs) == own
    assert [(name, p.default, p.kind) for name, p in theirs.items()] == [
        (name, p.default, p.kind) for name, p in ours.items() if name not in own
    ]


@by_name
def test_switches_for_how_it_is_computed_change_nothing(cls):
    runs = []
    for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}):
        params = parameters()
        runs.append(train(cls(params, **options), params, 3))
    assert all(equal(run, runs[0]) for run in runs)


@by_name
def test_a_closure_is_called_with_gradients_and_its_loss_returned(cls):
    (param,) = parameters(shapes=[(5,)])
    optimizer = cls([param], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        before = param.square().sum()
        assert float(optimizer.step(closure).detach()) == float(before)
    assert float(param.detach().square().sum()) < float(before)


@with_torch
def test_parameters_without_a_gradient_are_left_alone_and_count_their_own_steps(cls):
    pairs = [(cls, parameters(shapes=[(3,), (4,)])), (TORCH[cls], parameters(shapes=[(3,), (4,)]))]
    options = {"momentum": 0.9} if cls is SGD else {}
    optimizers = [made(params, lr=0.1, **options) for made, params in pairs]
    for step in range(6):
        for optimizer, (_, params) in zip(optimizers, pairs, strict=True):
            give_gradients(step, params)
            if step % 2 == 0:
                params[1].grad = None
            optimizer.step()
    ours, theirs = optimizers
    for param, other in zip(pairs[0][1], pairs[1][1], strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-6)
        assert set(ours.state[param]) == set(theirs.state[other])
        if cls is not SGD:
            assert ours.state[param]["step"] == theirs.state[other]["step"]


@by_name
def test_what_is_not_stepped_keeps_its_bits(cls):
    params = parameters(shapes=[(3,), (4,)])
    give_gradients(0, params)
    params[1].grad = None
    before = params[1].detach().clone()
    cls(params, weight_decay=0.5).step()
    assert torch.equal(params[1], before)


SCHEDULERS = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


@with_torch
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_schedulers_change_rates_and_betas_at_once(cls, scheduler, tensor_lr):
    if tensor_lr and scheduler == "one cycle":
        pytest.skip("torch's OneCycleLR takes no tensor")
    runs = []
    for made in (cls, TORCH[cls]):
        params = parameters()
        options = {"momentum": 0.9} if cls is SGD else {}
        optimizer = made(params, lr=torch.tensor(0.05) if tensor_lr else 0.05, **options)
        rates = SCHEDULERS[scheduler](optimizer)
        for step in range(10):
            give_gradients(step, params)
            optimizer.step()
            rates.step()
        runs.append(params)
    for param, other in zip(*runs, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@by_name
def test_a_group_added_later_is_stepped(cls):
    params = parameters(shapes=[(3,), (4,)])
    optimizer = cls(params[:1])
    train(optimizer, params, 2)
    before = params[1].detach().clone()
    optimizer.add_param_group({"params": params[1:], "lr": 0.1})
    train(optimizer, params, 1)
    assert not torch.equal(params[1], before)
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_lists_of_parameters_that_a_program_changes_are_followed():
    params = parameters(shapes=[(3,), (4,), (5,)])
    optimizer = AdamW(params[:2], lr=0.1)
    train(optimizer, params, 1)
    optimizer.param_groups[0]["params"] = params[1:]
    before = [param.detach().clone() for param in params]
    train(optimizer, params, 1)
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [True, False, False]
    assert [float(optimizer.state[param]["step"]) for param in params] == [1, 2, 1]


@by_name
def test_hooks_run_around_the_step_and_may_see_the_state(cls):
    seen = []
    params = parameters(shapes=[(3,)])
    optimizer = cls(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append("before"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(len(opt.state)))
    optimizer.register_state_dict_post_hook(lambda opt, saved: saved.update(more=1))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    train(optimizer, params, 1)
    states = 0 if cls is SGD else 1
    assert seen == ["before", states]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["more"] == 1
    assert seen[-1] == "loaded"


def test_a_hook_before_loading_may_give_another_state_dict():
    params = parameters(shapes=[(3,)])
    optimizer = AdamW(params)
    train(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW(parameters(shapes=[(3,)]))
    other.register_load_state_dict_pre_hook(lambda opt, state_dict: saved)
    other.load_state_dict({"state": {}, "param_groups": []})
    assert float(next(iter(other.state.values()))["step"]) == 2


@by_name
def test_the_profiler_sees_the_step(cls):
    params = parameters(shapes=[(3,)])
    optimizer = cls(params)
    give_gradients(0, params)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert f"Optimizer.step#{cls.__name__}.step" in {event.key for event in profile.key_averages()}


@by_name
def test_a_pickled_optimizer_goes_on(cls):
    params = parameters()
    optimizer = cls(params)
    train(optimizer, params, 2)
    twin = pickle.loads(pickle.dumps(optimizer))
    others = twin.param_groups[0]["params"]
    train(optimizer, params, 2, first=2)
    train(twin, others, 2, first=2)
    assert equal(params, others)


# ---- memory that changes between steps


@by_name
def test_state_that_a_program_replaces_or_moves_is_the_one_that_counts(cls):
    if cls is SGD:
        options, key = {"momentum": 0.9}, "momentum_buffer"
    else:
        options, key = {}, "exp_avg"
    for change in ("item", "data", "dict", "share", "later"):
        params, others = parameters(shapes=[(50,)]), parameters(shapes=[(50,)])
        optimizer, reference = cls(params, **options), cls(others, **options)
        train(optimizer, params, 3)
        train(reference, others, 3)
        held = optimizer.state[params[0]]
        train(optimizer, params, 2, first=3)
        train(reference, others, 2, first=3)
        twice = held[key] * 2
        if change == "item":
            optimizer.state[params[0]][key] = twice
        elif change == "data":
            optimizer.state[params[0]][key].data = twice
        elif change == "dict":
            optimizer.state[params[0]] = {**held, key: twice}
        elif change == "share":
            held[key].share_memory_()
            held[key].mul_(2)
        else:
            held[key].data = twice  # through what was got some steps ago
        reference.state[others[0]][key].mul_(2)
        train(optimizer, params, 2, first=5)
        train(reference, others, 2, first=5)
        assert equal(params, others), change
        assert torch.equal(optimizer.state[params[0]][key], reference.state[others[0]][key]), change


@by_name
def test_parameters_and_gradients_may_move(cls):
    params, others = parameters(shapes=[(50,)]), parameters(shapes=[(50,)])
    optimizer, reference = cls(params), cls(others)
    for step in range(4):
        train(optimizer, params, 1, first=step)
        train(reference, others, 1, first=step)
        params[0].data = params[0].data.clone()
    assert equal(params, others)


@by_name
def test_layouts_other_than_row_major_are_stepped_element_by_element(cls):
    image = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5) / 100
    layouts = {
        "channels last": lambda: image.clone(memory_format=torch.channels_last),
        "transposed": lambda: (
            image.permute(3, 2, 1, 0).clone(memory_format=torch.contiguous_format).permute(3, 2, 1, 0)
        ),
        "with gaps": lambda: torch.stack([image, image], -1)[..., 0],
    }
    for name, start in layouts.items():
        for grad_like in (start(), image):
            plain, odd = torch.nn.Parameter(image.clone()), torch.nn.Parameter(start())
            start_strides = odd.stride()
            optimizers = cls([plain], zero_grad_in_step=True), cls([odd], zero_grad_in_step=True)
            for step in range(3):
                give_gradients(step, [plain])
                odd.grad = torch.empty_like(grad_like).copy_(plain.grad)
                for optimizer in optimizers:
                    optimizer.step()
                assert not odd.grad.any()
            # LAMB adds up norms in the order of memory.
            torch.testing.assert_close(odd, plain, rtol=1e-5 if cls is LAMB else 0, atol=0)
            assert odd.stride() == start_strides, name


# ---- autograd


@by_name
def test_a_parameter_that_autograd_saved_raises_its_own_error_after_a_step(cls):
    params = parameters(shapes=[(3,)])
    optimizer = cls(params)
    loss = params[0].square().sum()
    give_gradients(0, params)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_that_autograd_saved_raises_its_own_error_once_zeroed():
    (param,) = parameters(shapes=[(3,)])
    optimizer = SGD([param], zero_grad_in_step=True)
    param.grad = torch.ones(3)
    scale = torch.ones(3, requires_grad=True)
    product = (scale * param.grad).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ---- GradScaler


@by_name
@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler_unscales_and_skips(cls, fused):
    (param,), (other,) = parameters(shapes=[(9,)]), parameters(shapes=[(9,)])
    optimizer, reference = cls([param], fused=fused), cls([other])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        give_gradients(step, [other])
        scaler.scale(torch.zeros(()))
        param.grad = other.grad * 1024.0 if step < 3 else torch.full((9,), float("inf"))
        before = copy.deepcopy(optimizer.state_dict())
        scaler.step(optimizer)
        if step < 3:
            reference.step()
            assert torch.equal(param.grad, other.grad)  # unscaled, as after torch's
        else:
            for key, state in optimizer.state_dict()["state"].items():
                assert all(torch.equal(value, before["state"][key][name]) for name, value in state.items())
        scaler.update(1024.0 if step < 3 else None)
        assert torch.equal(param, other)
    assert scaler.get_scale() == 512.0


# ---- saved states


def saved_by(cls, params, options, steps):
    optimizer = cls(params, **options)
    train(optimizer, params, steps)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


STATES = [
    (AdamW, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "amsgrad": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
    (SGD, {"lr": 0.01}),
]
FORMS = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize(("cls", "options"), STATES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_state_goes_to_torch_and_back(cls, options, form):
    never, params = parameters(), parameters()
    train(TORCH[cls](never, **options), never, 6)
    torchs = {**options, **form}
    theirs = saved_by(TORCH[cls], params, torchs, 2)
    ours = cls(params, lr=0.9)
    ours.load_state_dict(theirs)
    assert ours.param_groups[0]["lr"] == 0.01
    train(ours, params, 2, first=2)
    back = TORCH[cls](params, **{**torchs, "lr": 0.9})
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(back, params, 2, first=4)
    for param, other in zip(params, never, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@by_name
def test_a_loaded_run_goes_on_bit_for_bit(cls):
    for dtype in (torch.float32, torch.bfloat16):
        params, others = parameters(dtype), parameters(dtype)
        options = {"master_weights": dtype is torch.bfloat16, **({"momentum": 0.9} if cls is SGD else {})}
        saved = saved_by(cls, others, options, 3)
        optimizer = cls(params, **options)
        train(optimizer, params, 3)
        resumed = cls(others, **options)
        resumed.load_state_dict(saved)
        train(optimizer, params, 3, first=3)
        train(resumed, others, 3, first=3)
        assert equal(params, others)


def test_what_was_loaded_stays_its_owners():
    params, others = parameters(), parameters()
    optimizer, other = AdamW(params), AdamW(others)
    train(optimizer, params, 1)
    before = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(other, others, 2, first=1)
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][index][key]) for key, value in state.items())


def test_moments_are_float32_whatever_they_were_saved_as():
    params = parameters(torch.bfloat16)
    theirs = saved_by(torch.optim.AdamW, params, {}, 2)
    optimizer = AdamW(params)
    optimizer.load_state_dict(theirs)
    train(optimizer, params, 1, first=2)
    assert {t.dtype for state in optimizer.state.values() for t in state.values()} == {torch.float32}
    wide = [torch.nn.Parameter(param.detach().double()) for param in params]
    other = AdamW(wide)
    other.load_state_dict(optimizer.state_dict())
    train(other, wide, 1, first=3)
    assert {state["exp_avg"].dtype for state in other.state.values()} == {torch.float64}


def test_own_options_of_a_group_outlive_a_state_of_torchs():
    params = parameters(torch.bfloat16)
    optimizer = AdamW([{"params": params, "master_weights": True}])
    optimizer.load_state_dict(saved_by(torch.optim.AdamW, parameters(torch.bfloat16), {}, 1))
    assert optimizer.param_groups[0]["master_weights"] is True


@pytest.mark.parametrize("cls", [Adam, AdamW, Lion, LAMB], ids=lambda cls: cls.__name__)
def test_state_is_flat_and_counts_are_tensors(cls):
    params = parameters()
    optimizer = cls(params)
    train(optimizer, params, 3)
    for key in cls.rule.required:
        assert len({optimizer.state[param][key].untyped_storage().data_ptr() for param in params}) == 1
    assert all(float(optimizer.state[param]["step"]) == 3 for param in params)


def test_they_come_with_the_package():
    script = "import gpucomm; print(gpucomm.optim.AdamW.__name__)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "AdamW\n"
