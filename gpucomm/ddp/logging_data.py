"""What torch's DDP calls logging data: a wrapper's settings, sizes, times and errors under torch's keys.

Two maps, strings and integers. The times are those of sampled iterations, in nanoseconds, and come from the trace:
forward lasts from its call to its return, backward's computation from there to the last gradient, its communication
from the first bucket that is launched to the last one that is reduced.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpucomm.errors import text_of
from gpucomm.trace import read_trace
from gpucomm.world import environment_values

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel

# Iterations at the beginning that are all sampled, and what of the later ones is until the program says otherwise.
_ALL_SAMPLED = 10
_SAMPLE_RATE = 100

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_BACKEND_ENVIRONMENT = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}

# torch's keys name dtypes as C++ does.
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


@dataclass
class LoggingData:
    """Keys and values as torch's logger has them."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger:
    """What `ddp.logger` is with torch's class. Keeps no wrapper alive."""

    def __init__(self, ddp: "DistributedDataParallel") -> None:
        self.sample_rate = _SAMPLE_RATE
        self._ddp = weakref.ref(ddp)
        self._data = LoggingData()
        self._times = _Times()
        self._iterations = 0  # forwards whose backward is to be reduced
        self._sampled = 0  # of those, the reduction that the times were taken from last

    # ---- what torch's logger has

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """What is known once the wrapper is constructed."""
        ddp = self._wrapper()
        params = ddp._build_params_for_reducer()[0]
        strs, ints = self._data.strs_map, self._data.ints_map
        backend = dist.get_backend(ddp.process_group)
        strs.update({name.lower(): value for name, value in environment_values(_ENVIRONMENT).items()})
        variables = _BACKEND_ENVIRONMENT.get(backend, {})
        values = environment_values(variables.values())
        strs.update({key: values[variable] for key, variable in variables.items()})
        strs["module_name"] = module_name
        strs["backend_name"] = backend
        strs["device_ids"] = ", ".join(map(str, device_ids))
        strs["dtypes"] = ", ".join(sorted({_CPP_NAMES.get(p.dtype, str(p.dtype)) for p in params}))
        strs["bucket_sizes"] = ", ".join(map(str, self._bucket_sizes()))
        ints.update(
            world_size=dist.get_world_size(ddp.process_group),
            rank=dist.get_rank(ddp.process_group),
            iteration=0,
            num_parameter_tensors=len(params),
            total_parameter_size_bytes=sum(p.numel() * p.element_size() for p in params),
            output_device=output_device,
            bucket_cap_bytes=ddp.bucket_bytes_cap,
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            has_sync_bn=has_sync_bn,
            is_multi_device_module=ddp.is_multi_device_module,
        )
        if backend == "gloo":
            ints["gloo_num_threads"] = _gloo_threads(ddp.process_group, ddp.device)
        if static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """A forward whose backward is reduced begins: samples the iteration before it, if it is one to sample."""
        number, self._iterations = self._iterations, self._iterations + 1
        if number > 0 and (number < _ALL_SAMPLED or number % self.sample_rate == 0):
            self._data.ints_map["iteration"] = number
            reduction = self._wrapper()._reduction
            if (latest := reduction.engine.iteration) != self._sampled:
                self._sampled = latest
                reduction.engine.look_at_reduced()
                self._times.sample([(e.kind, e.begin_ns, e.end_ns) for e in read_trace(reduction.trace, latest)])
        self._times.forward_begin = time.monotonic_ns()

    def set_error_and_log(self, text: str) -> None:
        self._data.ints_map["has_error"] = 1
        self._data.strs_map["error"] = text

    @contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Around what may raise."""
        try:
            yield
        except Exception as error:
            self.set_error_and_log(text_of(error))
            raise

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        """A copy; what concerns the plan and the last reduction is that of now. can_set_static_graph: once two are."""
        data = LoggingData(dict(self._data.strs_map), {key: int(value) for key, value in self._data.ints_map.items()})
        data.ints_map.update(self._times.as_keys())
        ddp = self._ddp()
        if ddp is not None and ddp._reduction.engine.iteration > 0:
            self._add_last_reduction(ddp, data)
        return data

    # ---- what stands behind it

    def note_forward_end(self) -> None:
        """The forward returned; the backward's computation is counted from here."""
        self._times.forward_end = time.monotonic_ns()

    def backward_stats(self) -> list[int]:
        """For each parameter that was trainable at construction: ns from the forward's end until it was ready."""
        ddp = self._wrapper()
        events = read_trace(ddp._reduction.trace, ddp._reduction.engine.iteration)
        ready = {event.id: event.begin_ns for event in events if event.kind == "ready"}
        start = self._times.forward_end
        return [max(ready[i] - start, 0) if i in ready else 0 for i in ddp.reducer.indices]

    def _add_last_reduction(self, ddp: "DistributedDataParallel", data: LoggingData) -> None:
        reduction = ddp._reduction
        number_of = {index: number for number, index in enumerate(ddp.reducer.indices)}
        strs, ints = data.strs_map, data.ints_map
        order = [number_of[i] for i in reduction.engine.ready_order if i in number_of]
        strs["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))
        ints["num_buckets_reduced"] = reduction.engine.launched
        ints["unused_parameter_size"] = sum(reduction.slots.specs[i].nbytes for i in reduction.unused_here)
        ints["has_rebuilt_buckets"] = int(reduction.slots.is_final)
        if reduction.engine.iteration > 1:
            ints["can_set_static_graph"] = int(reduction.graph_is_static)
        if reduction.slots.is_final:
            plan = reduction.slots.next_plan or reduction.plan
            members = [[number_of[s.parameter] for s in b.slots if s.parameter in number_of] for b in plan.buckets]
            strs["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, numbers)) for numbers in members)
            strs["rebuilt_bucket_sizes"] = ", ".join(map(str, self._bucket_sizes()))

    def _bucket_sizes(self) -> list[int]:
        """In bytes, without what lies between slots."""
        reduction = self._wrapper()._reduction
        plan = reduction.slots.next_plan or reduction.plan
        return [sum(reduction.slots.specs[slot.parameter].nbytes for slot in bucket.slots) for bucket in plan.buckets]

    def _wrapper(self) -> "DistributedDataParallel":
        ddp = self._ddp()
        if ddp is None:
            raise RuntimeError("the DistributedDataParallel of this logger is gone")
        return ddp


class _Times:
    """Of the last sampled iteration, and the means over all that were sampled. CLOCK_MONOTONIC nanoseconds."""

    def __init__(self) -> None:
        self.forward_begin = 0
        self.forward_end = 0
        self._count = 0
        self._sums: dict[str, int] = {}
        self._latest: dict[str, int] = {}

    def sample(self, events: list[tuple[str, int, int]]) -> None:
        """events: (kind, begin_ns, end_ns) of the iteration's trace; without gradients or buckets there is nothing."""
        packs = [end for kind, _, end in events if kind in ("pack", "pack_bucket")]
        reduces = [(begin, end) for kind, begin, end in events if kind == "reduce"]
        if not packs or not reduces or not self.forward_begin:
            return
        begins = {
            "forward_compute_time": self.forward_begin,
            "backward_compute_time": self.forward_end,
            "backward_comm_time": max(min(begin for begin, _ in reduces), self.forward_end),
        }
        ends = {
            "forward_compute_time": self.forward_end,
            "backward_compute_time": max(packs),
            "backward_comm_time": max(end for _, end in reduces),
        }
        lasted = {name: max(ends[name] - begins[name], 0) for name in begins}
        overlap = max(ends["backward_compute_time"] - begins["backward_comm_time"], 0)
        lasted["backward_compute_comm_overlap_time"] = min(
            overlap, lasted["backward_compute_time"], lasted["backward_comm_time"]
        )
        self._count += 1
        for name, ns in lasted.items():
            self._sums[name] = self._sums.get(name, 0) + ns
        to_wall_clock = time.time_ns() - time.monotonic_ns()
        starts = {f"{name}_start": ns + to_wall_clock for name, ns in begins.items()}
        stops = {f"{name}_end": ns + to_wall_clock for name, ns in ends.items() if name != "forward_compute_time"}
        self._latest = {**lasted, **starts, **stops}

    def as_keys(self) -> dict[str, int]:
        return {**self._latest, **{f"avg_{name}": ns // self._count for name, ns in self._sums.items()}}


def _gloo_threads(group: dist.ProcessGroup, device: torch.device) -> int:
    return getattr(getattr(group._get_backend(device), "options", None), "_threads", 0)
