"""The optimizers' arithmetic: torch.optim's, or the paper's formula in float64, over 50 steps."""

import copy
import math

import pytest
import torch

from gpucomm.optim import LAMB, SGD, Adam, AdamW, Lion

SHAPES = [(7, 5), (1,), (1000,), (33, 3, 3, 3), (0,), (1025,), ()]
STEPS = 50

# What 50 steps may differ from torch's, which rounds in other places: in parameters of size 1 to 3.
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-14, torch.bfloat16: 0.04, torch.float16: 0.005}

TORCH = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW, SGD: torch.optim.SGD}
VARIANTS = [
    (AdamW, {}),
    (AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    (AdamW, {"maximize": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (Adam, {"lr": 1e-2}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (SGD, {"lr": 0.01}),
    (SGD, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": 0.01, "momentum": 0.9}),
    (SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    (SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
]
OPTIMIZERS = [Adam, AdamW, SGD, Lion, LAMB]


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(step, *copies):
    """The same gradients for each list of parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    for params in zip(*copies, strict=True):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = grad.to(param.dtype).reshape(param.shape)


def train(optimizer, params, steps=STEPS, first=0):
    for step in range(first, first + steps):
        give_gradients(step, params)
        optimizer.step()
    return params


def furthest(params, others):
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(params, others, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel() > 0)


def in_groups(params):
    return [
        {"params": params[:3], "weight_decay": 0.2},
        {"params": params[3:4], "lr": 0.05},
        {"params": params[4:], "maximize": True},
    ]


@pytest.mark.parametrize(("cls", "options"), VARIANTS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_steps_are_those_of_torch(cls, options, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    if dtype in (torch.bfloat16, torch.float16):
        # Torch keeps moments in the parameters' type: the reference has parameters of 16 bits and moments of 32.
        theirs = parameters(dtype)
        reference = [torch.nn.Parameter(param.detach().float()) for param in theirs]
        optimizer = TORCH[cls](reference, **options)
        for step in range(STEPS):
            give_gradients(step, theirs, reference)
            for param, wide in zip(theirs, reference, strict=True):
                wide.grad = param.grad.float()
            optimizer.step()
            with torch.no_grad():
                for wide in reference:
                    wide.copy_(wide.to(dtype))
        theirs = reference
    else:
        train(TORCH[cls](theirs, **options), theirs)
    assert furthest(train(cls(ours, **options), ours), theirs) <= TOLERANCE[dtype]


@pytest.mark.parametrize("cls", TORCH, ids=lambda cls: cls.__name__)
def test_each_group_has_its_options(cls):
    ours, theirs = parameters(), parameters()
    train(cls(in_groups(ours), lr=0.01), ours)
    train(TORCH[cls](in_groups(theirs), lr=0.01), theirs)
    assert furthest(ours, theirs) <= TOLERANCE[torch.float32]


def lion(params, grads, states, lr, betas=(0.9, 0.99), weight_decay=0.0):
    for w, g, m in zip(params, grads, states, strict=True):
        c = betas[0] * m + (1 - betas[0]) * g
        w.sub_(lr * (c.sign() + weight_decay * w))
        m.copy_(betas[1] * m + (1 - betas[1]) * g)


def lamb(params, grads, states, step, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
    for w, g, (m, v) in zip(params, grads, states, strict=True):
        m.copy_(betas[0] * m + (1 - betas[0]) * g)
        v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
        r = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps) + weight_decay * w
        norm, update_norm = w.norm(), r.norm()
        w.sub_(lr * (norm / update_norm if norm > 0 and update_norm > 0 else 1.0) * r)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lion_is_the_papers_formula(dtype, weight_decay):
    params = parameters(dtype)
    exact = [param.detach().double().clone() for param in params]
    moments = [torch.zeros_like(param) for param in exact]
    optimizer = Lion(params, lr=1e-2, weight_decay=weight_decay)
    for step in range(STEPS):
        give_gradients(step, params)
        lion(exact, [param.grad.double() for param in params], moments, 1e-2, weight_decay=weight_decay)
        optimizer.step()
    assert furthest(params, exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lamb_is_the_papers_formula_with_norms_of_each_parameter(dtype):
    params = parameters(dtype)
    with torch.no_grad():
        params[0].mul_(100)
        params[2].zero_()
    exact = [param.detach().double().clone() for param in params]
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in exact]
    optimizer = LAMB(params, lr=1e-2)
    for step in range(STEPS):
        give_gradients(step, params)
        lamb(exact, [param.grad.double() for param in params], moments, step + 1, 1e-2)
        optimizer.step()
    scale = max(float(param.abs().max()) for param in exact if param.numel())
    assert furthest(params, exact) <= TOLERANCE[dtype] * scale


def test_lamb_does_not_depend_on_the_other_parameters():
    together, apart = parameters(), parameters()
    train(LAMB(together, lr=1e-2), together)
    for index, param in enumerate(apart):
        optimizer = LAMB([param], lr=1e-2)
        for step in range(STEPS):
            give_gradients(step, together)
            param.grad = together[index].grad
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_runs_are_equal_bit_for_bit(cls, dtype):
    first, second = parameters(dtype), parameters(dtype)
    train(cls(first), first)
    train(cls(second), second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield lambda count: torch.set_num_threads(count)
    torch.set_num_threads(before)


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(cls, threads, two_threads):
    shapes = [(100_003,), (17, 1000), (1,), (0,), (65_537,), *[(999,)] * 20]
    runs = []
    for count in (1, threads):
        two_threads(count)
        params = parameters(shapes=shapes)
        optimizer = cls(params, lr=1e-2)
        train(optimizer, params, steps=4)
        runs.append([*params, *(t for state in optimizer.state.values() for t in state.values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("cls", [Adam, AdamW, SGD, Lion], ids=lambda cls: cls.__name__)
def test_a_parameter_cut_in_two_anywhere_is_stepped_the_same(cls):
    for at in (1, 8, 500, 1024, 2999):
        whole, halves = parameters(shapes=[(3000,)]), []
        start = whole[0].detach().clone()
        halves = [torch.nn.Parameter(part.clone()) for part in (start[:at], start[at:])]
        optimizers = cls(whole, lr=1e-2, weight_decay=0.1), cls(halves, lr=1e-2, weight_decay=0.1)
        for step in range(5):
            give_gradients(step, whole)
            halves[0].grad, halves[1].grad = whole[0].grad[:at].clone(), whole[0].grad[at:].clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(torch.cat(list(halves)), whole[0])


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_a_small_task_converges(cls):
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = torch.tanh(x @ torch.randn(8, 1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    lr = {SGD: 0.3, Lion: 3e-3, LAMB: 0.03}.get(cls, 1e-2)
    optimizer = cls(model.parameters(), lr=lr)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("cls", [Adam, AdamW, SGD, Lion], ids=lambda cls: cls.__name__)  # LAMB: its norms are of all
def test_an_element_whose_gradient_is_nan_becomes_nan_and_no_other(cls):
    params = parameters(shapes=[(40,)])
    params[0].grad = torch.ones(40)
    params[0].grad[17] = math.nan
    cls(params).step()
    assert params[0].isnan().nonzero().tolist() == [[17]]


def test_masters_follow_the_float32_run():
    wide = parameters()
    with torch.no_grad():
        for param in wide:
            param.copy_(param.bfloat16())  # so that both begin with the same values
    narrow = [torch.nn.Parameter(param.detach().bfloat16()) for param in wide]
    optimizers = AdamW(wide, lr=1e-4), AdamW(narrow, lr=1e-4, master_weights=True)
    for step in range(STEPS):
        give_gradients(step, narrow)
        for param, other in zip(wide, narrow, strict=True):
            param.grad = other.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for param, other in zip(wide, narrow, strict=True):
        assert torch.equal(optimizers[1].state[other]["master"], param)
        assert torch.equal(other, param.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_a_program_writes_into_a_parameter_becomes_its_masters(dtype):
    (param,) = parameters(dtype, [(2000,)])
    optimizer = SGD([param], lr=1e-6, master_weights=True)
    give_gradients(0, [param])
    optimizer.step()
    master = optimizer.state[param]["master"]
    kept = master.clone()
    param.data[100:200] = 7.0  # past autograd's version counter
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert bool((master[100:200] == 7.0).all())
    assert torch.equal(master[:100], kept[:100])
    assert torch.equal(master[200:], kept[200:])


def test_zeroing_in_the_step_leaves_zeros_and_the_same_parameters():
    for dtype in TOLERANCE:
        zeroing, plain = parameters(dtype), parameters(dtype)
        optimizers = AdamW(zeroing, zero_grad_in_step=True), AdamW(plain)
        give_gradients(0, zeroing, plain)
        for params in (zeroing, plain):
            for param in params:
                param.grad = param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert all(not param.grad.any() for param in zeroing)
        assert any(param.grad.any() for param in plain)
        assert all(torch.equal(a, b) for a, b in zip(zeroing, plain, strict=True))


def test_a_copy_of_parameters_and_optimizer_goes_on_alike():
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, 3)
    twin = copy.deepcopy(optimizer)
    train(optimizer, params, 3, first=3)
    others = twin.param_groups[0]["params"]
    train(twin, others, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
