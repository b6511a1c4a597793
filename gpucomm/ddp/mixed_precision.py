"""`mixed_precision=`: forward and backward in a narrower dtype, parameters that stay wide beside it.

    lower      a forward of the module begins: each parameter's data is a narrow copy, its wide data kept (the master)
    restore    a reduced backward ended, an optimizer steps, a state_dict is loaded: the data is the master again

Gradients come narrow from autograd, travel in reduce_dtype (see reduction/wire.py) and become wide in `.grad`. The
meaning of torch's `_MixedPrecision`, whose masters come back bucket by bucket, from a stream of their own.
"""

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.utils import _cast_forward_inputs
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpucomm.reduction.layout.local import is_distributed
from gpucomm.reduction.layout.wire import Wire

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_precision(name: str, value: Any) -> Any:
    """The argument. Raises TypeError for what lacks the three dtypes, ValueError for dtypes that are not served."""
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        if not hasattr(value, field):
            raise TypeError(
                f"{name} is {value!r} without {field}, accepted is torch.nn.parallel.distributed._MixedPrecision"
            )
        if (dtype := getattr(value, field)) is not None and dtype not in _DTYPES:
            accepted = ", ".join(map(str, _DTYPES))
            raise ValueError(f"{name}.{field} is {dtype!r}, accepted are None, {accepted}")
    return value


def wire_of(config: Any) -> Wire:
    """Gradients come in param_dtype and travel in reduce_dtype, else in param_dtype, else in their own."""
    travels = config.reduce_dtype or config.param_dtype
    return Wire({} if travels is None else dict.fromkeys(_DTYPES, travels), config.param_dtype)


class _Lowered(NamedTuple):
    """A parameter whose data is a narrow copy. version: of the parameter when the copy was put there."""

    param: torch.nn.Parameter
    master: torch.Tensor
    version: int


class MixedPrecision:
    """The narrow copies and masters of one wrapper's module. Hooks of the module keep it as long as the module.

    config: torch's _MixedPrecision, checked. ignored: names of parameters and buffers that stay as they are, beside the
    tensors marked `_ddp_ignored`.
    """

    def __init__(self, config: Any, module: torch.nn.Module, ignored: set[str]) -> None:
        self._config = config
        self._module = module
        self._ignored = ignored
        self._lowered: list[_Lowered] = []
        self._was_lowered = False
        self._wide_buffers: dict[str, torch.dtype] = {}
        for name, param in module.named_parameters():
            if is_distributed(param) and config.param_dtype is not None:
                raise NotImplementedError(f"parameter '{name}' is distributed: param_dtype is not served for those")
        for param in self._served_parameters():
            _note(param, param.data, torch.empty(0, dtype=config.param_dtype or param.dtype))
        self._cast_buffers()
        module.register_forward_pre_hook(self._on_forward)
        module.register_forward_hook(self._on_forward_end, always_call=True)
        module.register_state_dict_post_hook(partial(self._on_state_dict))  # on which it can set an attribute
        module.register_load_state_dict_pre_hook(self._on_load_state_dict)
        _live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy of the module, whose parameters count their versions anew."""
        self.__dict__.update(state)
        self._lowered = [lowered._replace(version=lowered.param._version) for lowered in self._lowered]
        _live.add(self)

    def cast_inputs(self, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Floating tensors in them become param_dtype."""
        return _cast_forward_inputs(self._config.param_dtype, *inputs, **kwargs)

    def lower(self) -> None:
        """Puts narrow copies in the parameters' places; keeps those that are there."""
        if self._config.param_dtype is None or self._lowered:
            return
        for param in self._served_parameters():
            master = param.data
            param.data = narrow = master.to(self._config.param_dtype)
            _note(param, master, narrow)
            self._lowered.append(_Lowered(param, master, param._version))

    def restore(self) -> None:
        """Puts the masters back. What was written to a parameter meanwhile is taken over."""
        lowered, self._lowered = self._lowered, []
        for param, master, version in lowered:
            if param._version != version:
                master.copy_(param.data)
            param.data = master
            _note(param, master, torch.empty(0, dtype=self._config.param_dtype))

    def on_backward_end(self, reduced: bool) -> None:
        """reduced: its gradients are about to be; if not, the backward that is may still need the narrow copies."""
        if reduced:
            self.restore()
        else:
            self._widen_grads()

    def _widen_grads(self) -> None:
        """Accumulation goes on in the masters' dtype."""
        for param, master, _ in self._lowered:
            if (grad := param.grad) is not None and grad.dtype != master.dtype:
                grad.data = grad.data.to(master.dtype)

    def _served_parameters(self) -> list[torch.nn.Parameter]:
        return [
            param
            for name, param in self._module.named_parameters()
            if param.is_floating_point() and not self._is_ignored(name, param)
        ]

    def _is_ignored(self, name: str, tensor: torch.Tensor) -> bool:
        return name in self._ignored or getattr(tensor, "_ddp_ignored", False)

    def _cast_buffers(self) -> None:
        for name, buffer in self._module.named_buffers():
            if self._config.buffer_dtype is None or not buffer.is_floating_point() or self._is_ignored(name, buffer):
                continue
            self._wide_buffers[name] = buffer.dtype
            buffer.data = buffer.data.to(self._config.buffer_dtype)

    # ---- hooks of the module

    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._was_lowered = bool(self._lowered)
        self.lower()

    def _on_forward_end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and not self._was_lowered:
            self.restore()  # no backward will

    def _on_state_dict(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Checkpoints hold masters, and buffers as wide as they were."""
        masters = {id(param): master for param, master, _ in self._lowered}
        for name, param in module.named_parameters(remove_duplicate=False):
            if prefix + name in state and id(param) in masters:
                state[prefix + name] = masters[id(param)].detach()
        for name, dtype in self._wide_buffers.items():
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].to(dtype)

    def _on_load_state_dict(self, *_: Any) -> None:
        self.restore()


def _note(param: torch.nn.Parameter, master: torch.Tensor, narrow: torch.Tensor) -> None:
    """Where programs written for torch's class look. narrow: without elements while it is not in use."""
    param._fp_param = master  # type: ignore[attr-defined]
    param._mp_param = narrow  # type: ignore[attr-defined]


_live: "weakref.WeakSet[MixedPrecision]" = weakref.WeakSet()


def _restore_before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """An optimizer is never to step a narrow copy, which after local backwards alone is still there."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for precision in _live:
        if any(id(lowered.param) in stepped for lowered in precision._lowered):
            precision.restore()


register_optimizer_step_pre_hook(_restore_before_step)
