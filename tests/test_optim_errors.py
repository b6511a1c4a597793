"""What the optimizers refuse: torch's classes of errors, the value named, nothing changed."""

import copy
import math

import pytest
import torch
from test_optim import OPTIMIZERS, give_gradients, parameters, train

from gpucomm.optim import LAMB, SGD, Adam, AdamW, Lion

by_name = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
WITH_BETAS = [Adam, AdamW, Lion, LAMB]


@by_name
@pytest.mark.parametrize("lr", [-0.1, math.nan, torch.tensor(-0.1)])
def test_a_learning_rate_that_is_not_positive_or_zero_is_refused(cls, lr):
    for params in (parameters(), [{"params": parameters(), "lr": lr}]):
        with pytest.raises(ValueError, match=r"Invalid learning rate: .*(-0\.1|nan)"):
            cls(params, lr=lr)
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        cls(parameters(), lr=torch.ones(2))


@by_name
def test_a_negative_weight_decay_is_refused(cls):
    with pytest.raises(ValueError, match="Invalid weight_decay value: -1"):
        cls(parameters(), weight_decay=-1)


@pytest.mark.parametrize("cls", WITH_BETAS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("betas", [(1.0, 0.9), (-0.1, 0.9), (math.nan, 0.9)])
def test_betas_outside_0_to_1_are_refused(cls, betas):
    with pytest.raises(ValueError, match=f"Invalid beta parameter at index 0: {betas[0]}"):
        cls(parameters(), betas=betas)
    with pytest.raises(ValueError, match=f"Invalid beta parameter at index 1: {betas[0]}"):
        cls(parameters(), betas=betas[::-1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": -1}, "Invalid momentum value: -1"),
        ({"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "zero dampening"),
    ],
)
def test_sgds_own_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        SGD(parameters(), **options)


def test_a_negative_eps_is_refused():
    for cls in (Adam, AdamW, LAMB):
        with pytest.raises(ValueError, match="Invalid epsilon value: -1"):
            cls(parameters(), eps=-1)


@by_name
def test_switches_that_cannot_be_are_refused(cls):
    with pytest.raises(RuntimeError, match="does not support `differentiable`"):
        cls(parameters(), differentiable=True)
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        cls(parameters(), fused=True, foreach=True)
    with pytest.raises(ValueError, match="`master_weights` and `stochastic_rounding` cannot be `True` together"):
        cls(parameters(torch.bfloat16), master_weights=True, stochastic_rounding=True)
    with pytest.raises(ValueError, match="Invalid rounding_seed: -3"):
        cls(parameters(torch.bfloat16), stochastic_rounding=True, rounding_seed=-3)


@by_name
def test_no_parameters_and_no_iterable_are_refused(cls):
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        cls(parameters()[0])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        cls([1.0])
    with pytest.raises(TypeError, match="sets"):
        cls([{"params": set(parameters())}])
    with pytest.raises(ValueError, match="non-leaf"):
        cls([parameters()[0] * 2])


@by_name
def test_an_empty_group_is_accepted_beside_others(cls):
    params = parameters()
    optimizer = cls([{"params": []}, {"params": params}])
    train(optimizer, params, 1)
    assert len(optimizer.param_groups) == 2


@by_name
def test_a_parameter_twice_is_refused(cls):
    params = parameters(shapes=[(3,), (4,)])
    with pytest.raises(ValueError, match=r"more than once.*shape \(3,\)"):
        cls([*params, params[0]])
    with pytest.raises(ValueError, match="more than one parameter group"):
        cls([{"params": params}, {"params": params[:1]}])
    optimizer = cls(params)
    optimizer.param_groups[0]["params"].append(params[1])
    give_gradients(0, params)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"more than once.*shape \(4,\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@by_name
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_parameters_that_are_no_real_numbers_are_refused(cls, dtype):
    param = torch.zeros(3, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"requires all the params to be floating point.*{dtype}"):
        cls([param])
    optimizer = cls(parameters())
    with pytest.raises(RuntimeError, match="floating point"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


@by_name
def test_parameters_on_another_device_are_refused(cls):
    with pytest.raises(RuntimeError, match=r"supported devices: \['cpu'\].*meta"):
        cls([torch.zeros(3, device="meta")])


def refused_step(optimizer, params, words):
    state = copy.deepcopy(optimizer.state_dict()["state"])
    before = [param.detach().clone() for param in params]
    versions = [param._version for param in params]
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert [param._version for param in params] == versions
    after = optimizer.state_dict()["state"]
    assert after.keys() == state.keys()
    for index, found in after.items():
        assert all(torch.equal(value, state[index][key]) for key, value in found.items())


@by_name
@pytest.mark.parametrize("steps", [0, 2])
def test_sparse_gradients_are_refused_and_nothing_changes(cls, steps):
    params = parameters(shapes=[(3,), (4, 2)])
    optimizer = cls(params)
    train(optimizer, params, steps)
    give_gradients(9, params)
    params[1].grad = torch.ones(4, 2).to_sparse()
    refused_step(optimizer, params, "does not support sparse gradients.*parameter 1 of shape \\(4, 2\\)")


@by_name
def test_gradients_of_another_dtype_are_refused_and_nothing_changes(cls):
    params = parameters(shapes=[(3,), (4, 2)])
    optimizer = cls(params)
    train(optimizer, params, 2)
    give_gradients(9, params)
    params[1].data = params[1].data.double()
    refused_step(optimizer, params, "same dtype, device.*parameter 1 .*float64 on cpu and its gradient torch.float32")


@by_name
def test_a_state_of_another_optimizer_is_refused_and_nothing_changes(cls):
    params = parameters(shapes=[(3,), (4, 2)])
    optimizer = cls(params)
    train(optimizer, params, 2)
    other = torch.optim.Adadelta(parameters(shapes=[(3,), (4, 2)]))
    train(other, other.param_groups[0]["params"], 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"of another optimizer: the state of parameter 0 has .*acc_delta"):
        optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(before)


@by_name
def test_a_state_of_another_model_is_refused_and_nothing_changes(cls):
    options = {"momentum": 0.9} if cls is SGD else {}
    params = parameters(shapes=[(3,), (4, 2)])
    optimizer = cls(params, **options)
    train(optimizer, params, 2)
    before = copy.deepcopy(optimizer.state_dict())
    for shapes, words in (
        ([(3,), (2, 4)], "of another model: '.*' of parameter 1 has shape \\(2, 4\\), the parameter \\(4, 2\\)"),
        ([(3,)], "doesn't match the size of optimizer's group"),
    ):
        others = parameters(shapes=shapes)
        other = cls(others, **options)
        train(other, others, 1)
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(other.state_dict())
        assert str(optimizer.state_dict()) == str(before)
    two = cls([{"params": [param]} for param in parameters(shapes=[(3,), (4, 2)])], **options)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(two.state_dict())
