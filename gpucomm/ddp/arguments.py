"""The wrapper's constructor arguments: each checked for type and range, all for contradictions.

Classes of errors, and the phrases that programs look for in them, are torch's where torch refuses the same thing.
"""

import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gpucomm import _core, cuda
from gpucomm.ddp.mixed_precision import check_precision, wire_of
from gpucomm.gpus import device_of
from gpucomm.nccl_options import NcclOptions
from gpucomm.reduction.layout.buckets import MIB, BucketPlan
from gpucomm.reduction.layout.wire import Wire, check_wire_dtype, narrow_wire
from gpucomm.transport import Transport
from gpucomm.world import Settings, nonfinite_policy

# What stock DDP reports as its default; our own plan has buckets of another size.
_REPORTED_CAP_MB = 25


@dataclass
class Arguments:
    """Those of DistributedDataParallel that need no other file to be understood, checked; what they mean: see there.

    Raises TypeError, ValueError: naming the argument, its value and what is accepted.
    """

    device_ids: Sequence[int | torch.device] | None
    output_device: int | torch.device | None
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: dist.ProcessGroup | None
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None
    param_to_hook_all_reduce: torch.nn.Parameter | None
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: Sequence[float] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None
    transport: str | Transport
    plan: BucketPlan | None
    timeout: timedelta | float | None
    nonfinite: str | None
    wire_dtype: torch.dtype | None
    audit_every: int
    nccl_options: NcclOptions | None
    overlap: bool | None

    def __post_init__(self) -> None:
        for field in fields(self):
            setattr(self, field.name, _CHECKS[field.name](field.name, getattr(self, field.name)))
        if (self.delay_all_reduce_named_params is None) != (self.param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        if self.plan is not None and (self.bucket_cap_mb is not None or self.bucket_cap_mb_list):
            raise ValueError("plan and a bucket cap contradict each other: give one of them")
        if self.wire_dtype is not None and self.mixed_precision is not None:
            raise ValueError("wire_dtype and mixed_precision contradict each other: give reduce_dtype in the latter")
        if self.nccl_options is not None and self.transport not in ("auto", "nccl"):
            raise ValueError(f"nccl_options beside transport={self.transport!r}, which is not NCCL's")

    @property
    def nonfinite_policy(self) -> str:
        """The argument's, or the environment's."""
        return nonfinite_policy(self.nonfinite)

    @property
    def wire(self) -> Wire:
        """How gradients travel, by argument or environment."""
        if self.mixed_precision is not None:
            wire = wire_of(self.mixed_precision)
        else:
            wire = narrow_wire(self.wire_dtype or Settings.from_environment().wire_dtype)
        return replace(wire, apart=self.nccl_options is not None and self.nccl_options.register_buffers)

    @property
    def caps_bytes(self) -> tuple[int, ...] | None:
        """Of the first, second, ... bucket of a dtype, the last one repeating; None: our own plan is wanted."""
        if self.bucket_cap_mb_list:
            return tuple(int(cap * MIB) for cap in self.bucket_cap_mb_list)
        return None if self.bucket_cap_mb is None else (int(self.bucket_cap_mb * MIB),)

    @property
    def reported_cap_bytes(self) -> int:
        """What stock DDP has as bucket_bytes_cap."""
        return max(self.caps_bytes or [_REPORTED_CAP_MB * MIB])

    @property
    def syncs_buffers_in_forward(self) -> bool:
        asked = self.forward_sync_buffers if self.forward_sync_buffers is not None else self.broadcast_buffers
        return asked is not False

    @property
    def syncs_buffers_at_init(self) -> bool:
        """Only the older argument keeps buffers apart from the start."""
        return self.forward_sync_buffers is not None or self.broadcast_buffers is not False

    def warn_deprecated(self, stacklevel: int) -> None:
        """Warns as the installed torch does: broadcast_buffers is deprecated where it has forward_sync_buffers."""
        texts = []
        if self.broadcast_buffers is not None and "forward_sync_buffers" in _TORCHS_ARGUMENTS:
            texts.append(_BOTH_TEXT if self.forward_sync_buffers is not None else _BROADCAST_TEXT)
        if self.check_reduction:
            texts.append("`check_reduction` is deprecated and does nothing. Please avoid using it.")
        for text in texts:
            warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


_TORCHS_ARGUMENTS = inspect.signature(TorchDDP.__init__).parameters

_BOTH_TEXT = (
    "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and ignored."
)

_BROADCAST_TEXT = (
    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, but mind that forward_sync_buffers=False "
    "still gives all ranks rank 0's buffers at construction: where they must differ, broadcast_buffers=False remains "
    "the only way"
)


def check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        _refuse(TypeError, "module", module, "a torch.nn.Module")


def check_delayed(module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """named: what delay_all_reduce_named_params holds."""
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, param in named:
        if params.get(name) is not param:
            raise ValueError(
                f"delay_all_reduce_named_params has a parameter under the name {name!r}, which in the module is "
                f"{'another one' if name in params else 'none'}; accepted are the names of module.named_parameters()"
            )


def check_parameters(params: Sequence[torch.nn.Parameter], delayed: Sequence[torch.nn.Parameter]) -> None:
    """params, delayed: those that are reduced in buckets, and those by delay_all_reduce_named_params."""
    everything = [*params, *delayed]
    if not any(p.requires_grad for p in everything):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    types = {p.device.type for p in everything}
    if len(types) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {types}."
        )
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in everything):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )


def check_nccl_options(options: NcclOptions | None, params: list[torch.nn.Parameter]) -> None:
    """Raises ValueError for options of NCCL's beside parameters that it does not reach."""
    if options is not None and device_of(params) is None:
        raise ValueError(f"nccl_options is given, and the parameters are on {params[0].device.type}: NCCL serves GPUs")


def check_devices(params: Sequence[torch.nn.Parameter], device_ids: Any, output_device: Any) -> None:
    """device_ids, output_device: none are accepted for modules on the CPU, the module's own for one on a GPU.

    Raises NotImplementedError for other devices.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, it is {device_ids}")
    devices = {p.device for p in params}
    device = next(iter(devices))
    on_gpu = cuda.gpu.serves(device)
    if device.type != "cpu" and not on_gpu:
        raise NotImplementedError(
            f"parameters on {device.type} devices are not served, only those on the CPU and on GPUs"
        )
    if on_gpu and len(devices) > 1:
        raise NotImplementedError(f"a module on several GPUs ({sorted(map(str, devices))}) is not served, only on one")
    if (device_ids or output_device) and not on_gpu:
        raise ValueError(
            "device_ids and output_device arguments only work with modules on one GPU, but got device_ids "
            f"{device_ids}, output_device {output_device}, and module parameters on {devices}"
        )


# ---- one check for each kind of argument: (name, value) -> the value in the form that is used


def _refuse(kind: type[Exception], name: str, value: Any, accepted: str) -> NoReturn:
    raise kind(f"{name} is {value!r} ({type(value).__name__}), accepted is {accepted}")


def _flag(name: str, value: Any) -> bool:
    """Numbers 0 and 1 of any library, and None for False, as torch takes them: they come from configurations."""
    if value is None or (isinstance(value, numbers.Integral) and value in (0, 1)) or _is_numpy_bool(value):
        return bool(value)
    _refuse(ValueError if isinstance(value, numbers.Integral) else TypeError, name, value, "True or False")


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(TypeError, name, value, "an integer")
    return int(value)


def _interval(name: str, value: Any) -> int:
    accepted = "a whole number of iterations, 0 or more (0: never)"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(TypeError, name, value, accepted)
    if value < 0:
        _refuse(ValueError, name, value, accepted)
    return int(value)


def _cap(name: str, value: Any) -> float:
    accepted = "a number of MiB, 0 or more"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse(TypeError, name, value, accepted)
    cap = float(value)
    if not 0 <= cap < math.inf:
        _refuse(ValueError, name, value, accepted)
    return cap


def _caps(name: str, value: Any) -> list[float]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        _refuse(TypeError, name, value, "a list of numbers of MiB")
    return [_cap(f"{name}[{index}]", cap) for index, cap in enumerate(value)]


def _devices(name: str, value: Any) -> Sequence[int | torch.device]:
    accepted = "a list of at most one device: a number, a torch.device or its name"
    if isinstance(value, str) or not isinstance(value, Iterable):
        _refuse(TypeError, name, value, accepted)
    devices = list(value)
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, (numbers.Integral, torch.device, str)):
            _refuse(TypeError, name, value, accepted)
    return devices


def _device(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.device, str)):
        _refuse(TypeError, name, value, "a number, a torch.device or its name")
    return value


def _named_params(name: str, value: Any) -> list[tuple[str, torch.nn.Parameter]]:
    accepted = "a list of (name, parameter)"
    if isinstance(value, (str, dict, torch.Tensor)) or not isinstance(value, Iterable):
        _refuse(TypeError, name, value, accepted)
    pairs = list(value)
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            _refuse(TypeError, f"an element of {name}", pair, "a name and its parameter")
    return [(pair[0], pair[1]) for pair in pairs]


def _trainable(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        _refuse(TypeError, name, value, "a parameter")
    if not value.requires_grad:
        raise ValueError(f"{name} does not require a gradient, accepted is a parameter that does")
    return value


def _group(name: str, value: Any) -> Any:
    # What dist.new_group gives to a rank that is not in the group is refused by World.of, with that reason.
    if not isinstance(value, dist.ProcessGroup) and value != dist.GroupMember.NON_GROUP_MEMBER:
        _refuse(TypeError, name, value, "a torch.distributed process group")
    return value


def _transport(name: str, value: Any) -> Any:
    if not isinstance(value, (str, _core.Transport)):
        _refuse(TypeError, name, value, "the name of a transport or a gpucomm.Transport")
    return value


def _plan(name: str, value: Any) -> BucketPlan:
    if not isinstance(value, BucketPlan):
        _refuse(TypeError, name, value, "a gpucomm.BucketPlan (BucketPlan.from_json reads a saved one)")
    return value


def _nccl_options(name: str, value: Any) -> NcclOptions:
    if not isinstance(value, NcclOptions):
        _refuse(TypeError, name, value, "a gpucomm.NcclOptions")
    return value


def _duration(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (timedelta, numbers.Real)):
        _refuse(TypeError, name, value, "a timedelta or a number of seconds")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "device_ids": _optional(_devices),
    "output_device": _optional(_device),
    "dim": _integer,
    "broadcast_buffers": _optional(_flag),
    "init_sync": _flag,
    "process_group": _optional(_group),
    "bucket_cap_mb": _optional(_cap),
    "find_unused_parameters": _flag,
    "check_reduction": _flag,
    "gradient_as_bucket_view": _flag,
    "static_graph": _flag,
    "delay_all_reduce_named_params": _optional(_named_params),
    "param_to_hook_all_reduce": _optional(_trainable),
    "skip_all_reduce_unused_params": _flag,
    "bucket_cap_mb_list": _optional(_caps),
    "batched_grad_copy": _flag,
    "forward_sync_buffers": _optional(_flag),
    "transport": _transport,
    "plan": _optional(_plan),
    "timeout": _optional(_duration),
    "nonfinite": lambda name, value: nonfinite_policy(value),
    "mixed_precision": _optional(check_precision),
    "device_mesh": lambda name, value: value,  # checked by group_of
    "wire_dtype": lambda name, value: check_wire_dtype(value),
    "audit_every": _interval,
    "nccl_options": _optional(_nccl_options),
    "overlap": _optional(_flag),
}
