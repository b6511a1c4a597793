"""DistributedDataParallel: torch's surface over our reducer."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.ddp.comm_hooks import CAPS as HOOK_CAPS
from gpucomm.ddp.comm_hooks import builtin_hook, check_hook
from gpucomm.ddp.join import DdpJoinHook, meet_in_forward
from gpucomm.ddp.mesh import check_placement, group_of
from gpucomm.ddp.replicas import broadcast_tensors, check_same_model
from gpucomm.reduction.buckets import MIB, BucketPlan, ParameterSpec
from gpucomm.reduction.parameters import ParameterTable
from gpucomm.reduction.reducer import Reducer
from gpucomm.reduction.wire import narrow_wire, refuse_beside_hooks
from gpucomm.trace import TraceEvent, read_trace
from gpucomm.transport import Transport
from gpucomm.world import Settings, World, nonfinite_policy, withdrawing

# What stock reports as its default; our own plan has buckets of another size.
_STOCK_CAP_MIB = 25
# Shared memory wants small buckets: reduced while they are in cache, and early. Sockets want few messages.
_OWN_CAPS = {"shm": (1 * MIB,), "loopback": (1 * MIB,)}
_SOCKET_CAPS = (1 * MIB, 8 * MIB)
# In shared memory a piece of a bucket is reduced as soon as it is packed, while a core's own cache still holds it.
_PIECE_BYTES = {"shm": MIB // 4, "loopback": MIB // 4}


class DistributedDataParallel(TorchDDP):
    """Data-parallel training of a module: a drop-in for torch's class of this name, of which it is a subclass.

    In every iteration each gradient is reduced, or stays local on purpose (no_sync), or the iteration raises on every
    rank. After backward, each parameter's `.grad` is the mean over the ranks, a view of a bucket; a gradient that the
    program keeps is never overwritten. Construction is collective.

    The arguments are torch's, in its order, with its meaning (see its documentation), then:

    Args:
        transport: how gradients travel: "auto" (shared memory if every rank of the group has it, else the process group
            itself), "shm", "c10d", "loopback" (this process stands for all ranks), or a gpucomm Transport.
        plan: a BucketPlan to use in place of one made from the order in which gradients become ready.
        timeout: timedelta or seconds a wait for a peer lasts before CommTimeout; default: the process group's.
        nonfinite: what becomes of an iteration with a gradient that is infinite or not a number: "pass" (nothing),
            "raise" (NonFinite on every rank, naming the first rank and parameter), or "skip" (on every rank, optimizers
            leave the parameters alone; .grad stays as it is, so that a GradScaler lowers its scale); default: pass.
        wire_dtype: torch.bfloat16 or torch.float16: fp32 gradients travel as that, `.grad` is fp32 again. Each rank's
            gradient is rounded once, and the mean once; they are divided by the number of ranks before they are added,
            in fp32. A gradient beyond the range of float16 (65,504) becomes infinite on every rank, in `.grad` too.
            Such parameters take the memory of their gradient and of its form on the wire.

    Raises:
        ModelsDiffer: the ranks' models differ; on every rank, naming the first difference.
        TransportUnavailable: a transport asked for by name cannot serve the group.
        NotImplementedError: naming an argument that is not served yet.
        ValueError, TypeError, RuntimeError: for arguments that torch's class refuses too.
        StepFailed, PeerFailed, CommTimeout: later, from backward; see gpucomm.errors.
    """

    reducer: Reducer  # type: ignore[assignment]

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: str | Transport = "auto",
        plan: BucketPlan | None = None,
        timeout: timedelta | float | None = None,
        nonfinite: str | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        with withdrawing(process_group):
            group = group_of(process_group, device_mesh)
        with withdrawing(group):
            _refuse_unserved(
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                mixed_precision=mixed_precision,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params or None,
            )
            self._caps = caps = _bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
            wire = narrow_wire(wire_dtype if wire_dtype is not None else Settings.from_environment().wire_dtype)
            world = World.of(group, timeout, transport, str(wire))
            nonfinite = nonfinite_policy(nonfinite)
            self.process_group = world.group
            self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            table = ParameterTable(module, self.parameters_to_ignore)
            self._module_parameters = table.params
            _check_module(self._module_parameters, device_ids, output_device)
            check_placement(table.names, table.params, world.global_ranks)
            if plan is not None:
                trainable = [i for i, p in enumerate(table.params) if p.requires_grad]
                plan.check([ParameterSpec.of(p, wire) for p in table.params], trainable)
            _warn_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)

        self.device_ids = None
        self.output_device = None
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = False
        self.dim = dim
        self.module = module
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.bucket_bytes_cap = int(max(bucket_cap_mb_list or [bucket_cap_mb or _STOCK_CAP_MIB]) * MIB)
        self.bucket_bytes_cap_default = caps is None
        asked = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
        self.forward_sync_buffers = asked is not False
        self._assign_modules_buffers()

        exchange = world.meet()
        if init_sync:
            check_same_model(table.names, self._module_parameters, world.global_ranks, exchange)
        core_transport = world.connect(exchange)
        stream = _core.InlineStream()
        self._comm = Communicator.over(core_transport, stream)
        if init_sync:
            buffers_too = forward_sync_buffers is not None or broadcast_buffers is not False
            broadcast_tensors(self._module_parameters, self._comm)
            broadcast_tensors(self.modules_buffers if buffers_too else [], self._comm)
        self.reducer = Reducer(
            table,
            self._comm,
            stream,
            core_transport,
            caps if caps is not None else _OWN_CAPS.get(core_transport.name(), _SOCKET_CAPS),
            piece_bytes=_PIECE_BYTES.get(core_transport.name(), 0),
            timeout_s=world.timeout_s,
            nonfinite=nonfinite,
            allow_unused=find_unused_parameters,
            static_graph=static_graph,
            plan=plan,
            wire=wire,
        )
        self.reducer.sync_requested = _requested_by(self)

    # ---- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward; in training, buffers are first brought to rank 0's values."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple, dict]:
        if torch.is_grad_enabled():
            self.reducer.before_forward()
        # Not in an evaluation under no_grad, which one rank may well run alone.
        if torch.is_grad_enabled() or self.training:
            self._meet_peers()
        return inputs, kwargs

    def _meet_peers(self) -> None:
        Join.notify_join_context(self)
        source: int | None = 0 if self.will_sync_module_buffers() else None
        if self._join_config.enable:
            source, _ = meet_in_forward(self, joined=False)
        if source is not None:
            self.sync_buffers(source)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled():
            self.reducer.after_forward(reduce=self.require_backward_grad_sync)
            # Left alone by an evaluation: one rank's would make its buffers' next broadcast differ from its peers'.
            self.require_forward_param_sync = self.require_backward_grad_sync
        return output

    # ---- buffers

    # This and the next: the versions of torch's class differ in which attribute holds the setting.
    @property
    def broadcast_buffers(self) -> bool:
        """Whether training forwards bring buffers to rank 0's values: the older name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

    def sync_buffers(self, source: int = 0) -> None:
        """Gives every rank the buffers of rank `source` of the group; collective. Training forwards do it too."""
        self._assign_modules_buffers()  # a program may put a new tensor in a buffer's place
        self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        broadcast_tensors(self.modules_buffers, self._comm, authoritative_rank)

    def _sync_buffers(self) -> None:
        self.sync_buffers()

    # ---- what happened

    def trace(self) -> list[TraceEvent]:
        """What the engine recorded of the latest iterations, oldest first."""
        return read_trace(self.reducer.trace)

    @property
    def transport(self) -> str:
        """The name of the transport in use."""
        return self._comm.transport

    # ---- communication hooks

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Has each bucket reduced by hook(state, bucket), as torch's class does; collective, before backward.

        bucket: torch's GradBucket, or what has its methods; the gradients in it are this rank's, undivided. The hook
        returns a torch Future of a tensor of the bucket's size, which becomes the gradients. A further hook gets, after
        backward, what those before it made of a bucket. Gradients without a slot in a bucket (in the iteration in which
        a parameter is unfrozen or replaced, sparse ones) are averaged without the hook. RuntimeError beside wire_dtype.
        """
        check_hook(hook)
        refuse_beside_hooks(self.reducer.slots.wire)
        caps = self._caps if self._caps is not None else HOOK_CAPS
        self.reducer.add_comm_hook(state, hook, caps, self.process_group)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if (hook := builtin_hook(comm_hook_type)) is not None:
            self.register_comm_hook(self.process_group, hook)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Has an optimizer made that steps a bucket's parameters as soon as it is reduced, as torch's class does."""
        # Lazily: it compiles TorchScript when it is imported.
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP: torch has no functional one") from error

    # ---- means

    @contextmanager
    def weight(self, count: float) -> Iterator[None]:
        """Around forward and backward of a micro-batch: its loss is a sum over `count` samples or tokens.

        The gradients of the iteration become the sum over all micro-batches of all ranks, divided by the sum of their
        counts: those of one process on everything together, however uneven the ranks' shares. All ranks give weights in
        an iteration or none does, else it raises StepFailed. count: a number of 0 or more, or a tensor of one element.
        """
        self.reducer.weight.add(count)
        yield

    # ---- not served yet

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's Join context; takes divide_by_initial_world_size, see join()."""
        return DdpJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        raise NotImplementedError("_register_buffer_comm_hook is not served yet")

    def __getstate__(self) -> Any:
        raise NotImplementedError("pickling and deepcopy of the wrapper are not served yet; use its .module")


def _requested_by(ddp: DistributedDataParallel) -> Any:
    """Whether gradients are to be reduced in a backward that no forward of the wrapper came before."""
    import weakref

    reference = weakref.ref(ddp)
    return lambda: getattr(reference(), "require_backward_grad_sync", True)


def _refuse_unserved(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"argument {name} is not served yet")


def _bucket_caps(cap_mb: float | None, cap_mb_list: list[float] | None) -> tuple[int, ...] | None:
    """The caps in bytes that the arguments ask for, None for our own plan."""
    if cap_mb is None and not cap_mb_list:
        return None
    caps: list[Any] = list(cap_mb_list) if cap_mb_list else [cap_mb]
    for cap in caps:
        if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not (0 <= cap < math.inf):
            name = "bucket_cap_mb_list" if cap_mb_list else "bucket_cap_mb"
            raise ValueError(f"{name} is {cap_mb_list or cap_mb!r}, accepted is a number of MiB, 0 or more")
    return tuple(int(cap * MIB) for cap in caps)


def _check_module(params: list[torch.nn.Parameter], device_ids: Any, output_device: Any) -> None:
    if not any(p.requires_grad for p in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    for param in params:
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                "Run a dummy forward pass to correctly initialize the modules"
            )
    types = {p.device.type for p in params}
    if len(types) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {types}."
        )
    if types != {"cpu"}:
        raise NotImplementedError(f"parameters on {types.pop()} devices are not served yet, only those on the CPU")
    if device_ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
            f"{device_ids}, output_device {output_device}, and module "
            f"parameters { ({p.device for p in params}) }."
        )


def _warn_deprecated(broadcast_buffers: bool | None, forward_sync_buffers: bool | None, check_reduction: bool) -> None:
    import warnings

    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=3,
        )
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )
