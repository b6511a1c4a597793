"""Gradients and parameters that are not plain memory: what is wrong is refused, the rest goes through copies."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class StandIn(NamedTuple):
    """What a step works on in place of a parameter and its gradient."""

    position: int  # among the optimizer's parameters
    param: Tensor
    copy: Tensor  # the parameter itself where only its gradient is not plain
    grad: Tensor


def plain_copies(optimizer: str, params: Iterable[tuple[int, Tensor]]) -> list[StandIn]:
    """Stand-ins for parameters with their indices. Raises RuntimeError where nothing can stand in."""
    return [_plain_copy(optimizer, index, param) for index, param in params]


def copy_back(stand_ins: list[StandIn], grads_too: bool) -> None:
    for each in stand_ins:
        if each.copy is not each.param:
            each.param.copy_(each.copy)
        if grads_too and each.param.grad is not None:
            each.param.grad.copy_(each.grad)


def _plain_copy(optimizer: str, index: int, param: Tensor) -> StandIn:
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients, please consider SparseAdam or SGD of torch.optim instead "
            f"(parameter {index} of shape {tuple(param.shape)} has one of layout {grad.layout})"
        )
    if (grad.dtype, grad.device) != (param.dtype, param.device) or param.is_complex() or param.device.type != "cpu":
        raise RuntimeError(
            "params and grads must have same dtype, device, and layout, and be floating point Tensors of supported "
            f"devices: ['cpu'], but parameter {index} of shape {tuple(param.shape)} is {param.dtype} on "
            f"{param.device} and its gradient {grad.dtype} on {grad.device}"
        )
    copy = param if is_dense(param) else param.detach().clone(memory_format=torch.contiguous_format)
    grad_copy = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype)
    grad_copy.copy_(grad)
    return StandIn(index, param, copy, grad_copy)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one gapless stretch of memory, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True
