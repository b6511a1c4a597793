"""A wrapper's construction: its attributes from the arguments, and what connects it with the other ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._utils import _get_device_index

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.ddp.arguments import Arguments, check_delayed, check_devices, check_parameters
from gpucomm.ddp.audit import Audit
from gpucomm.ddp.mixed_precision import MixedPrecision
from gpucomm.ddp.replicas import broadcast_tensors, check_same_model
from gpucomm.errors import TransportUnavailable
from gpucomm.gpus import Gpus, connect, device_of
from gpucomm.reduction import step_guard  # noqa: F401  it watches optimizers from when it is imported
from gpucomm.reduction.layout.buckets import MIB
from gpucomm.reduction.layout.parameters import ParameterTable
from gpucomm.reduction.reducer import Reducer
from gpucomm.transport import Transport
from gpucomm.world import World

if TYPE_CHECKING:
    from gpucomm.ddp.wrapper import DistributedDataParallel

# Shared memory wants small buckets: reduced while they are in cache, and early. Sockets want few messages, but the wire
# has to be busy from the first gradient on: at 1 Gbit/s, waiting for a bucket of 8 MiB left a tenth of what could be
# hidden exposed, and buckets of 2 MiB (17 ms there) fill the wire as well as one.
# NCCL over NVLink wants several MiB a message, and the first soon.
_OWN_CAPS = {"shm": (1 * MIB,), "loopback": (1 * MIB,), "nccl": (2 * MIB, 8 * MIB, 25 * MIB)}
_SOCKET_CAPS = (MIB // 4, MIB // 2, 1 * MIB, 2 * MIB)
# In shared memory a piece of a bucket is reduced as soon as it is packed, while a core's own cache still holds it.
_PIECE_BYTES = {"shm": MIB // 4, "loopback": MIB // 4}


def set_attributes(ddp: "DistributedDataParallel", arguments: Arguments, module: torch.nn.Module) -> None:
    """Sets the attributes that come from the arguments, under the names that torch's class has for them."""
    ddp._arguments = arguments
    delayed = arguments.delay_all_reduce_named_params or ()
    check_delayed(module, delayed)
    ddp._delay_all_reduce_params = [param for _, param in delayed]
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    ddp.parameters_to_ignore = {*ignored, *(name for name, _ in delayed)}
    ddp._module_parameters = [p for n, p in module.named_parameters() if n not in ddp.parameters_to_ignore]
    check_parameters(ddp._module_parameters, ddp._delay_all_reduce_params)
    everything = [*ddp._module_parameters, *ddp._delay_all_reduce_params]
    check_devices(everything, arguments.device_ids, arguments.output_device)
    ddp.device = everything[0].device
    ddp.device_type = ddp.device.type
    ddp.device_ids, ddp.output_device = None, None
    if arguments.device_ids:  # of a module on a GPU: inputs are moved there
        ddp.device_ids = [_get_device_index(device, True) for device in arguments.device_ids]
        ddp.output_device = _get_device_index(
            arguments.device_ids[0] if arguments.output_device is None else arguments.output_device, True
        )
    ddp.is_multi_device_module = False
    ddp.use_side_stream_for_tensor_copies = True
    ddp.dim = arguments.dim
    ddp.module = module
    ddp.static_graph = False
    ddp.find_unused_parameters = arguments.find_unused_parameters
    ddp.gradient_as_bucket_view = arguments.gradient_as_bucket_view
    ddp.batched_grad_copy = arguments.batched_grad_copy
    ddp.skip_all_reduce_unused_params = arguments.skip_all_reduce_unused_params
    ddp.mixed_precision = arguments.mixed_precision
    ddp._precision = None
    if arguments.mixed_precision is not None:
        ddp._precision = MixedPrecision(arguments.mixed_precision, module, ddp.parameters_to_ignore)
    if arguments.device_mesh is not None:
        ddp.device_mesh = arguments.device_mesh
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True
    ddp.forward_sync_buffers = arguments.syncs_buffers_in_forward
    ddp.bucket_bytes_cap = arguments.reported_cap_bytes
    ddp.bucket_bytes_cap_list = list(arguments.caps_bytes or ()) if arguments.bucket_cap_mb_list else []
    ddp.bucket_bytes_cap_default = arguments.caps_bytes is None
    ddp.broadcast_bucket_size = 250 * MIB  # of torch's functions that a program may call with it; ours have theirs
    ddp._comm_hooks = []
    ddp._lazy_init_ran = False
    ddp._ddp_sink_clone = True
    ddp._use_python_reducer = False
    ddp._delay_all_reduce_all_params = False


def make_table(ddp: "DistributedDataParallel") -> ParameterTable:
    """The module's parameters but those that are to be ignored."""
    ignored = ddp.parameters_to_ignore - {name for name, _ in ddp._arguments.delay_all_reduce_named_params or ()}
    return ParameterTable(ddp.module, ignored)


@dataclass(frozen=True)
class Connection:
    """What a wrapper talks to its peers through."""

    comm: Communicator
    audit: Audit
    reduction: Reducer

    @classmethod
    def make(cls, ddp: "DistributedDataParallel", world: World, table: ParameterTable, init_sync: bool) -> "Connection":
        """Collective. init_sync: the models are compared, and get rank 0's values."""
        arguments = ddp._arguments
        exchange = world.meet()
        if init_sync:
            check_same_model(table.names, table.params, world.global_ranks, exchange)
        gpus = None
        if (ordinal := device_of(table.params)) is not None:
            check_gpu_transport(world)
            gpus = connect(world, exchange, ordinal, arguments.nccl_options)
        transport = world.connect(exchange)  # with GPUs, of what the hosts tell each other
        if arguments.wire.travels and isinstance(transport, Transport):
            transport.widens_sums = False  # few bytes are what was asked for
        stream = _core.InlineStream()
        comm = Communicator.over(transport, stream, gpus)
        audit = Audit(arguments.audit_every, comm)
        if init_sync:
            broadcast_tensors(table.params, comm)
            broadcast_tensors(ddp.modules_buffers if arguments.syncs_buffers_at_init else [], comm)
            if arguments.syncs_buffers_at_init:
                audit.note_equal_buffers(ddp, iteration=0)
        name = transport.name() if gpus is None else gpus.transport.name()
        own_caps = _OWN_CAPS.get(name, _SOCKET_CAPS)
        reduction = Reducer(
            table,
            comm,
            stream,
            transport,
            own_caps if arguments.caps_bytes is None else arguments.caps_bytes,
            piece_bytes=_PIECE_BYTES.get(name, 0),
            timeout_s=world.timeout_s,
            nonfinite=arguments.nonfinite_policy,
            allow_unused=ddp.find_unused_parameters,
            static_graph=ddp.static_graph,
            plan=arguments.plan,
            delayed=table.indices_of(ddp._delay_all_reduce_params),
            skip_unused=ddp.skip_all_reduce_unused_params,
            wire=arguments.wire,
            gpus=gpus,
            overlap=_overlaps(ddp, world, gpus),
        )
        if ddp._precision is not None:
            reduction.on_backward = ddp._precision.on_backward_end
        return cls(comm, audit, reduction)


def _overlaps(ddp: "DistributedDataParallel", world: World, gpus: Gpus | None) -> bool:
    """Whether buckets are reduced while backward runs: see the argument."""
    asked = ddp._arguments.overlap
    if asked is not None:
        return asked
    may_differ = ddp.find_unused_parameters or ddp._arguments.static_graph
    has_others = world.size < dist.get_world_size()
    return not (gpus is not None and may_differ and has_others)


def check_gpu_transport(world: World) -> None:
    """Raises TransportUnavailable if what was asked for does not reach parameters on a GPU."""
    if world.transport not in ("auto", "nccl"):
        name = world.transport if isinstance(world.transport, str) else type(world.transport).__name__
        raise TransportUnavailable(f"transport {name!r} reduces in host memory, the parameters are on a GPU: 'nccl'")
