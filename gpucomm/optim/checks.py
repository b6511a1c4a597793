"""What the optimizers refuse before they change anything, in torch's words where torch has some."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    """A group's defaults: what a constructor was given, by name, but for the parameters. arguments: its locals()."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


def number(name: str, value: float | Tensor) -> float:
    """The value of an option that may be a tensor of one element."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element")
    return float(value)


def check_rates(group: dict[str, Any]) -> None:
    """lr and weight_decay, which every optimizer has; `not >=` is true of NaN as well."""
    if not number("lr", group["lr"]) >= 0.0:
        raise ValueError(f"Invalid learning rate: {group['lr']}")
    if not number("weight_decay", group["weight_decay"]) >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
    if group["master_weights"] and group["stochastic_rounding"]:
        raise ValueError("`master_weights` and `stochastic_rounding` cannot be `True` together")
    if not 0 <= group["rounding_seed"] < 1 << 64:
        raise ValueError(f"Invalid rounding_seed: {group['rounding_seed']}, accepted are 0 to 2**64 - 1")


def check_betas(group: dict[str, Any]) -> None:
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= number(f"betas[{index}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if len(group["betas"]) != 2:
        raise ValueError(f"betas must be two numbers, got {len(group['betas'])}")


def check_eps(group: dict[str, Any]) -> None:
    if not group["eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")


def check_switches(optimizer: str, group: dict[str, Any]) -> None:
    """Torch's switches for how it is computed: there is one way here."""
    if group.get("differentiable"):
        raise RuntimeError(f"{optimizer} does not support `differentiable`: its step is not recorded by autograd")
    if group.get("fused") and group.get("foreach"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")


def checked_params(optimizer: str, group: dict[str, Any]) -> dict[str, Any]:
    """The group with its parameters in a list, each of them one that can be stepped."""
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, set):
        return group  # torch's own error
    group = {**group, "params": list(params)}
    tensors = [param[1] if isinstance(param, tuple) else param for param in group["params"]]
    for index, param in enumerate(tensors):
        if isinstance(param, Tensor):
            check_param(optimizer, index, param)
    check_distinct([{"params": tensors}])
    return group


def check_param(optimizer: str, index: int, param: Tensor) -> None:
    if param.dtype not in DTYPES or param.device.type != "cpu" or param.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} requires all the params to be floating point Tensors of supported devices: ['cpu'] but "
            f"parameter {index} of its group is {param.dtype}, {param.layout} and {param.device.type}"
        )


def check_distinct(groups: list[dict[str, Any]]) -> None:
    """No parameter twice: it would be stepped twice, by two threads at once."""
    seen: set[int] = set()
    for index, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
        if id(param) in seen:
            raise ValueError(
                f"some parameters appear more than once in the parameter groups: parameter {index}, of shape "
                f"{tuple(param.shape)}, was there before"
            )
        seen.add(id(param))
