"""The state of the optimizers: which tensors a parameter has, where they lie, and how a saved state becomes one.

State is flat: what is made at one time lies in one tensor for each dtype, parameter after parameter in the order of
the optimizer, each at a multiple of 64 bytes; `optimizer.state[param]` has views of it, with the parameter's strides.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpucomm._core import optim as core
from gpucomm.optim.gradients import is_dense

COUNT = "step"
MASTER = "master"
_LINE_NUMEL = 16  # 64 bytes of float32


class Keys(NamedTuple):
    """Keys of a parameter's state: its count of steps, what the rule keeps, its master; None: it has none."""

    counted: str | None
    states: tuple[str, ...]
    master: str | None


def keys_of(group: dict[str, Any], states: Sequence[str], counts: bool = True) -> Keys:
    """Of a group; counts: steps are counted also without stochastic rounding."""
    count = COUNT if counts or group["stochastic_rounding"] else None
    return Keys(count, tuple(states), MASTER if group["master_weights"] else None)


def wide_dtype(param: Tensor) -> torch.dtype:
    """What the parameter is computed in."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def first_indices(params: Iterable[Iterable[Tensor]]) -> list[int]:
    """What stochastic rounding counts of each parameter: see its note in csrc/kernels/step.h."""
    firsts, position = [], 0
    for param in chain.from_iterable(params):
        firsts.append(position)
        position += -(-param.numel() // 8) * 8
    return firsts


def prepare(
    states: dict[Tensor, dict[str, Any]], plan: core.OptimizerPlan, wanted: Sequence[tuple[int, Tensor, Keys]]
) -> None:
    """Gives these parameters, which have gradients, what is missing in their state, and tells the plan.

    states: the optimizer's; wanted: index among its parameters, parameter, keys of its group.
    """
    requests: list[Request] = []
    fresh = set()
    for index, param, keys in wanted:
        found = states[param]
        if keys.states and found.get(keys.states[0]) is None:
            fresh.add(index)
        requests += _requests(param, found, keys)
    for request, tensor in zip(requests, laid_out(requests), strict=True):
        states[request.param][request.key] = tensor
    for index, param, keys in wanted:
        if keys != Keys(None, (), None):
            plan.attach(index, states[param], index in fresh)
    plan.note(states)


class Request(NamedTuple):
    """A tensor of a parameter's state that is to be made, with these values (None: zeros)."""

    param: Tensor
    key: str
    values: Tensor | None


def _requests(param: Tensor, found: dict[str, Any], keys: Keys) -> list[Request]:
    wanted = [key for key in (keys.counted, *keys.states) if key is not None]
    if keys.master is not None and param.dtype.itemsize == 2:
        wanted.append(keys.master)
    requests = []
    for key in wanted:
        values = found.get(key)
        if not (isinstance(values, Tensor) and _fits(param, key, values)):
            start = param.detach() if key == keys.master else None
            requests.append(Request(param, key, start if values is None else torch.as_tensor(values)))
    return requests


def _fits(param: Tensor, key: str, value: Tensor) -> bool:
    if value.device.type != "cpu" or value.layout != torch.strided:
        return False
    if key == COUNT:
        return value.dtype == torch.float32 and value.shape == ()
    same = value.dtype == wide_dtype(param) and value.shape == param.shape
    return same and (value.stride() == strides(param) or (value.is_contiguous() and _is_row_major(param)))


def strides(param: Tensor) -> tuple[int, ...]:
    """Of its state: the parameter's own, row-major if it has gaps or overlaps."""
    return param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()


def _is_row_major(param: Tensor) -> bool:
    return param.is_contiguous() or not is_dense(param)


def laid_out(requests: Sequence[Request]) -> list[Tensor]:
    """The tensors that are asked for, in flat memory of their own."""
    made: list[Tensor] = [torch.empty(0)] * len(requests)
    kinds: dict[tuple[str, torch.dtype], list[int]] = {}
    for at, request in enumerate(requests):
        dtype = torch.float32 if request.key in (COUNT, MASTER) else wide_dtype(request.param)
        kinds.setdefault((request.key, dtype), []).append(at)
    for (key, dtype), members in kinds.items():
        sizes = [1 if key == COUNT else -(-requests[at].param.numel() // _LINE_NUMEL) * _LINE_NUMEL for at in members]
        flat = torch.zeros(sum(sizes), dtype=dtype)
        position = 0
        for at, size in zip(members, sizes, strict=True):
            param, values = requests[at].param, requests[at].values
            shape, stride = ((), ()) if key == COUNT else (param.shape, strides(param))
            made[at] = flat.as_strided(shape, stride, position)
            if values is not None:
                made[at].copy_(values.reshape(shape))
            position += size
    return made


# ---- saved states


def check_loaded(
    optimizer: str, states: Iterable[str], required: Iterable[str], groups: list[dict[str, Any]], saved: dict[str, Any]
) -> None:
    """Raises ValueError for a saved state dict that is not of this optimizer over the parameters of these groups."""
    own = {COUNT, MASTER}
    for index, param, found in _saved_states(groups, saved):
        kept = set(found) - own
        if found and (not set(required) <= set(found) or (kept and not kept & set(states))):
            raise ValueError(
                f"loaded state dict is of another optimizer: the state of parameter {index} has {sorted(found)}, "
                f"{optimizer} knows {sorted(own | set(states))}"
            )
        for key, value in found.items():
            if isinstance(value, Tensor) and key != COUNT and value.shape != param.shape:
                raise ValueError(
                    f"loaded state dict is of another model: '{key}' of parameter {index} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(param.shape)}"
                )


def adopt(
    states: dict[Tensor, dict[str, Any]], named: Iterable[str], groups: list[dict[str, Any]], saved: dict[str, Any]
) -> None:
    """Takes what was saved under the given names into the optimizer's state in place of what torch's loading has made
    of it: it gave that the parameter's dtype, and the memory is still that of whom it came from."""
    keys = {COUNT, MASTER, *named}
    requests = [
        Request(param, key, torch.as_tensor(value))
        for _, param, found in _saved_states(groups, saved)
        for key, value in found.items()
        if key in keys and value is not None
    ]
    for request, tensor in zip(requests, laid_out(requests), strict=True):
        states[request.param][request.key] = tensor


def _saved_states(groups: list[dict[str, Any]], saved: dict[str, Any]) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
    """(index, parameter, saved state) of those that have one; nothing if the groups do not match, which torch tells."""
    theirs = [group["params"] for group in saved["param_groups"]]
    ours = [group["params"] for group in groups]
    if [len(params) for params in theirs] != [len(params) for params in ours]:
        return
    pairs = zip(chain.from_iterable(theirs), chain.from_iterable(ours), strict=True)
    for index, (name, param) in enumerate(pairs):
        if isinstance(found := saved["state"].get(name), dict):
            yield index, param, found
