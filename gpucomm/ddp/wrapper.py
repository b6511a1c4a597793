"""DistributedDataParallel: torch's surface over our reducer."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gpucomm.communicator import Communicator
from gpucomm.ddp import buffers, optimizer_in_backward, state, sync_batch_norm
from gpucomm.ddp.arguments import Arguments, check_module, check_nccl_options
from gpucomm.ddp.audit import Audit, AuditReport
from gpucomm.ddp.comm_hooks import CAPS as HOOK_CAPS
from gpucomm.ddp.comm_hooks import builtin_hook, check_hook
from gpucomm.ddp.compiling import keep_compiler_out
from gpucomm.ddp.construction import Connection, make_table, set_attributes
from gpucomm.ddp.join import DdpJoinHook, meet_in_forward
from gpucomm.ddp.logging_data import Logger
from gpucomm.ddp.mesh import check_placement, group_of
from gpucomm.ddp.mixed_precision import MixedPrecision
from gpucomm.ddp.replicas import broadcast_tensors
from gpucomm.ddp.stand_in import StandIn
from gpucomm.ddp.torch_reducer import TorchReducer
from gpucomm.nccl_options import NcclOptions
from gpucomm.reduction.comm_hooks import name_of
from gpucomm.reduction.layout.buckets import BucketPlan, ParameterSpec
from gpucomm.reduction.layout.parameters import ParameterTable
from gpucomm.reduction.layout.wire import refuse_beside_hooks
from gpucomm.reduction.reducer import Reducer
from gpucomm.trace import TraceEvent, read_trace
from gpucomm.transport import Transport
from gpucomm.world import World, withdrawing


class DistributedDataParallel(TorchDDP, metaclass=StandIn):
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
            in fp32 (a process group of more than two ranks adds in its own way, rounding every sum). A gradient beyond
            the range of float16 (65,504) becomes infinite on every rank, in `.grad` too. Such parameters take the
            memory of their gradient and of its form on the wire. The variable GPUCOMM_WIRE_DTYPE is the default.
        audit_every: run audit() in the first training forward after every so many reductions; 0: never.
        nccl_options: an NcclOptions for parameters on GPUs: what NCCL may take, and whether it registers the buckets.
        overlap: False: buckets are reduced when backward ends, after all that it launched. For a program with further
            communicators on its GPUs (tensor or pipeline parallel) whose ranks do not all use the same parameters: in
            backward buckets and its own collectives would come in another order on each, and wait for each other.
            None: False where that can be (on GPUs, find_unused_parameters or static_graph, and the group is a part of
            all ranks), else True.

    Raises:
        ModelsDiffer: the ranks' models differ; on every rank, naming the first difference.
        TransportUnavailable: a transport asked for by name cannot serve the group.
        ValueError, TypeError, RuntimeError: for arguments that torch's class refuses too.
        StepFailed, PeerFailed, CommTimeout: later, from backward; see gpucomm.errors.
    """

    # What programs know of torch's reducer and logger; the reduction itself is ours.
    reducer: TorchReducer  # type: ignore[assignment]
    logger: Logger
    _reduction: Reducer
    _arguments: Arguments
    _precision: MixedPrecision | None
    _comm: Communicator
    _audit: Audit
    _comm_hooks: list[tuple[Callable, object]]  # in the order in which they were registered

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
        audit_every: int = 0,
        nccl_options: NcclOptions | None = None,
        overlap: bool | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        with withdrawing(process_group):
            group = group_of(process_group, device_mesh)
        with withdrawing(group):
            arguments = Arguments(
                device_ids=device_ids,
                output_device=output_device,
                dim=dim,
                broadcast_buffers=broadcast_buffers,
                init_sync=init_sync,
                process_group=process_group,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                mixed_precision=mixed_precision,
                device_mesh=device_mesh,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                bucket_cap_mb_list=bucket_cap_mb_list,
                batched_grad_copy=batched_grad_copy,
                forward_sync_buffers=forward_sync_buffers,
                transport=transport,
                plan=plan,
                timeout=timeout,
                nonfinite=nonfinite,
                wire_dtype=wire_dtype,
                audit_every=audit_every,
                nccl_options=nccl_options,
                overlap=overlap,
            )
            check_module(module)
            world = World.of(group, arguments.timeout, arguments.transport, str(arguments.wire))
            set_attributes(self, arguments, module)
            table = make_table(self)
            check_placement(table.names, table.params, world.global_ranks)
            check_nccl_options(nccl_options, table.params)
            if plan is not None:
                trainable = [i for i, p in enumerate(table.params) if p.requires_grad]
                plan.check([ParameterSpec.of(p, arguments.wire) for p in table.params], trainable)
            arguments.warn_deprecated(stacklevel=2)
        self._connect(world, table, init_sync=arguments.init_sync)
        if arguments.static_graph:
            self._set_static_graph()

    def _connect(self, world: World, table: ParameterTable, init_sync: bool) -> None:
        """Builds all that talks to other ranks; collective. init_sync: compare the models, and take rank 0's values."""
        keep_compiler_out()
        self._assign_modules_buffers()
        connection = Connection.make(self, world, table, init_sync)
        self.process_group = world.group
        self._comm, self._audit, self._reduction = connection.comm, connection.audit, connection.reduction
        self._reduction.sync_requested = _requested_by(self)
        for hook, hook_state in self._comm_hooks:
            self._add_comm_hook(hook_state, hook)
        self._passing_sync_batchnorm_handle(self.module)
        self._offer_torchs_view(table)

    def _offer_torchs_view(self, table: ParameterTable) -> None:
        """What programs know as `reducer` and `logger`."""
        self.reducer = TorchReducer(self, table.indices_of(self._build_params_for_reducer()[0]))
        self.logger = Logger(self)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.forward_sync_buffers,
            any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.module.modules()),
            self.static_graph,
        )
        if self._comm_hooks:
            self.logger._set_comm_hook_name(name_of(self._comm_hooks[-1][0]))

    # ---- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward; in training, buffers are first brought to rank 0's values."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple, dict]:
        if not self._lazy_init_ran:
            self._lazy_init()
        self.reducer.wait_for_futures()
        if torch.is_grad_enabled():
            if self.require_backward_grad_sync:
                self.logger.set_runtime_stats_and_log()
            self._reduction.before_forward()
        if self._is_training_forward():
            everybody = self._meet_peers()
            if everybody and torch.is_grad_enabled():
                self._audit.before_forward(self)
            self._audit.forget_buffers()
        if self._precision is not None:
            inputs, kwargs = self._precision.cast_inputs(inputs, kwargs)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            return moved_inputs[0], moved_kwargs[0]
        return inputs, kwargs

    def _meet_peers(self) -> bool:
        """Before a training forward: those that have joined are told, and buffers are brought together.

        Returns whether nobody has joined.
        """
        Join.notify_join_context(self)
        syncs, source, everybody = self._check_sync_bufs_pre_fwd(), 0, True
        if self._join_config.enable:
            source, _, _, everybody = meet_in_forward(self, joined=False)
        self._reduction.agreement.peers_joined = not everybody
        if syncs:
            self.sync_buffers(source)
        return everybody

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if self._is_training_forward() and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled():
            self._reduction.after_forward(reduce=self.require_backward_grad_sync)
            self.logger.note_forward_end()
            # Left alone by an evaluation: one rank's would make its buffers' next broadcast differ from its peers'.
            self.require_forward_param_sync = self.require_backward_grad_sync
        return output

    def _is_training_forward(self) -> bool:
        """False in an evaluation under no_grad, which one rank may well run alone."""
        return torch.is_grad_enabled() or self.training

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
        """Gives every rank the buffers of rank `source` of the group, or calls the buffer hook; collective.

        Training forwards do it already.
        """
        self._assign_modules_buffers()  # a program may put a new tensor in a buffer's place
        self._sync_module_buffers(source)

    def _sync_buffers(self) -> None:
        self.sync_buffers()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        buffers.sync(self, authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        broadcast_tensors(self.modules_buffers if bufs is None else bufs, self._comm, authoritative_rank)

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        sync_batch_norm.serve(module)

    # ---- gradients

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *, untouched: bool = False
    ) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ on the module's parameters, bucket by bucket instead of tensor by tensor; the
        same on every rank. On a GPU the host does not wait.

        untouched: the program promises that nothing has written to a gradient since backward (GradScaler.unscale_ does,
        so do collectives on `.grad`). Then on a GPU the 2-norm is summed up beside backward, from the second such call
        on, and no gradient is read for it. A promise that is not kept gives a wrong norm.

        Returns the norm of all gradients together, before clipping, on their device: float32, float64 if one of them
        is. Gradients that a program has put elsewhere, complex ones and distributed tensors go torch's way. Raises
        RuntimeError for a norm that is not finite, if asked to, which waits for it.
        """
        total = None
        if not self.parameters_to_ignore - set(self._reduction.names):
            total = self._reduction.norm.clip(float(max_norm), float(norm_type), error_if_nonfinite, untouched)
        if total is not None:
            return total
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type, error_if_nonfinite)

    # ---- are the replicas equal

    def audit(self) -> AuditReport:
        """Compares the replicas on all ranks bit for bit, by checksums, and returns what was compared; collective.

        That is all parameters, frozen ones too, and the buffers that training forwards bring together. Buffers are left
        out (the report counts 0) from a forward on that may have changed them until the next training forward or
        sync_buffers(), for they differ by right then, if forward_sync_buffers is off, and under a buffer hook. The
        state of optimizers is not looked at, nor what the module's list of parameters and buffers to ignore names. Of a
        DTensor the local part is compared. Call it outside backward; it reads every byte once.

        Raises:
            ReplicasDiffer: on every rank, naming the first tensor that differs, the ranks, the element and its values.
        """
        return self._audit.run(self)

    # ---- what happened

    def trace(self) -> list[TraceEvent]:
        """What the engine recorded of the latest iterations, oldest first.

        On a GPU a reduction is there once it is done and somebody looked: this does, an iteration does.
        """
        self._reduction.engine.look_at_reduced()
        return read_trace(self._reduction.trace)

    @property
    def transport(self) -> str:
        """The name of the transport in use."""
        return self._comm.transport

    # ---- settings that can change

    def _set_static_graph(self) -> None:
        """What the argument static_graph does; before the first iteration, on every rank."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self.reducer._set_static_graph()
        self.static_graph = True
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel with static_graph, which finds "
                "unused parameters by itself: leave it out, and see that which ones are unused does not change",
                stacklevel=2,
            )

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        """Whether the plan that is in force, or comes into force with the next iteration, is the final one."""
        return self._reduction.slots.is_final

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Goes on among the ranks of another group; collective over it. Between iterations, on all ranks of the old."""
        state.move(self, new_process_group)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        return state.of(self)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        state.restore(self, attributes)

    # ---- communication hooks

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Has each bucket reduced by hook(state, bucket), as torch's class does; collective, before backward.

        bucket: torch's GradBucket, or what has its methods; the gradients in it are this rank's, undivided. The hook
        returns a torch Future of a tensor of the bucket's size, which becomes the gradients. A further hook gets, after
        backward, what those before it made of a bucket. Gradients without a slot in a bucket (in the iteration in which
        a parameter is unfrozen or replaced, sparse ones) are averaged without the hook. RuntimeError beside wire_dtype.
        """
        with self.logger.recording_errors():
            check_hook(hook)
            refuse_beside_hooks(self._arguments.wire)
        self._add_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(name_of(hook))

    def _add_comm_hook(self, state: object, hook: Callable) -> None:
        caps = self._arguments.caps_bytes if self._arguments.caps_bytes is not None else HOOK_CAPS
        self._reduction.add_comm_hook(state, hook, caps, self.process_group)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if (hook := builtin_hook(comm_hook_type)) is not None:
            self.register_comm_hook(self.process_group, hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Has an optimizer made that steps a bucket's parameters as soon as it is reduced, as torch's class does.

        Raises RuntimeError with nonfinite="skip": whether an iteration is to be skipped is known when all is reduced.
        """
        if self._reduction.finite.policy == "skip":
            raise RuntimeError(
                "nonfinite='skip' beside an optimizer that steps bucket by bucket: it would have applied the iteration "
                "before it is known that it is to be skipped; use torch's _apply_optimizer_in_backward"
            )
        # Lazily: it compiles TorchScript when it is imported.
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP: torch has no functional one") from error

    def _setup_in_backward_optimizers(self) -> None:
        optimizer_in_backward.take_over(self)

    # ---- means

    @contextmanager
    def weight(self, count: float) -> Iterator[None]:
        """Around forward and backward of a micro-batch: its loss is a sum over `count` samples or tokens.

        The gradients of the iteration become the sum over all micro-batches of all ranks, divided by the sum of their
        counts: those of one process on everything together, however uneven the ranks' shares. All ranks give weights in
        an iteration or none does, else it raises StepFailed. count: a number of 0 or more, or a tensor of one element.
        One that raises before its backward counts nothing. `.grad` has to be None or zero when the iteration begins,
        else it raises StepFailed: what was divided already cannot be divided again.
        """
        loop = self._reduction.loop
        self._reduction.agreement.weight.add(count)
        reductions, backwards = self._reduction.engine.iteration, loop.backwards
        try:
            yield
        except BaseException:
            if (self._reduction.engine.iteration, loop.backwards) == (reductions, backwards):
                self._reduction.agreement.weight.take_back(count)  # its forward raised: it gave nothing
            raise

    # ---- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's Join context; takes divide_by_initial_world_size, see join()."""
        return DdpJoinHook(self, kwargs.get("divide_by_initial_world_size", True))


def _requested_by(ddp: DistributedDataParallel) -> Any:
    """Whether gradients are to be reduced in a backward that no forward of the wrapper came before."""
    reference = weakref.ref(ddp)
    return lambda: getattr(reference(), "require_backward_grad_sync", True)
