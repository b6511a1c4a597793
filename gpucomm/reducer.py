"""The reduction of one wrapper's gradients, iteration after iteration: policy around the engine.

    arm       first gradient of a backward: is it reduced or local, are the buckets free, is there a new plan
    ready     gradient after gradient: packed by the hook in C; here only what is not the plain case
    finish    outermost end of backward: slots without a gradient, the ranks' verdict, a second round, views into .grad

Every parameter, frozen ones too, has an index from construction on. Whatever concerns more than this rank is decided
from the verdict, which is the same on all of them.
"""

import _thread
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpucomm import _core
from gpucomm.backward import BackwardEnd, queue_at_outermost_end, starts_on_this_thread
from gpucomm.buckets import BucketMemory, BucketPlan, ParameterSpec, allocate_buckets
from gpucomm.communicator import Communicator
from gpucomm.errors import CommError, CommTimeout, PeerFailed, StepFailed
from gpucomm.parameters import ParameterTable
from gpucomm.second_round import SecondRound
from gpucomm.transport import Transport


class Reducer:
    """Owns the engine, the plan, the buckets and the hooks of the parameters of one wrapper.

    table: all parameters of the module, the same on every rank. caps: see BucketPlan.build.
    piece_bytes: buckets are packed and reduced in pieces of this size, 0: each as a whole.
    allow_unused: parameters without a gradient are no error. static_graph: which ones have none never changes.
    comm: brings the transport; collectives of the wrapper and of the engine come in one order on its stream.
    plan: a checked plan to use from the start and keep; else rebuilt once in the order in which gradients became ready.
    """

    def __init__(
        self,
        table: ParameterTable,
        comm: Communicator,
        stream: _core.Stream,
        transport: _core.Transport,
        caps: Sequence[int],
        *,
        piece_bytes: int,
        allow_unused: bool,
        static_graph: bool,
        plan: BucketPlan | None = None,
    ) -> None:
        self.table = table
        self.params = table.params
        self.names = table.names
        self.comm = comm
        self.transport = transport
        self.caps = list(caps)
        self.allow_unused = allow_unused
        self.static_graph = static_graph
        self.trace = _core.Trace()
        self.engine = _core.Engine(transport, stream, self.trace, len(self.params), piece_bytes=piece_bytes)
        self.plan_is_final = plan is not None
        self.sync_requested: Callable[[], bool] = lambda: True

        self._plan_next(plan or self._registration_order_plan())
        self._memories: list[BucketMemory] = []
        self._views: list[torch.Tensor | None] = [None] * len(self.params)
        self._second_round = SecondRound()
        self._kept: dict[int, torch.Tensor] = {}  # .grad of parameters that nobody may have used this time
        self._backwards = 0  # since the last reduction, local ones too
        self._forwards = 0  # training forwards of the wrapper since then
        self._reduce_next: bool | None = None  # what the wrapper's last forward asked for
        self._owes_reduction = False  # one of the forwards since the last reduction asked for one
        self._orphans: frozenset[int] = frozenset()  # while not active: parameters that the active wrapper lacks
        self._witness = next(i for i, p in enumerate(self.params) if p.requires_grad)
        self._started_on: int | None = None  # the thread whose program called backward, as far as seen
        self._arming = False
        self._disturbed = False  # another thread's backward came into this one
        self._pid = os.getpid()
        self._failure: BaseException | None = None  # communication is broken for good
        self._usage_error: str | None = None  # raised by the wrapper's next forward
        self._warnings: list[str] = []  # given once the iteration is complete
        self._static_usage: list[int] | None = None
        self._warned_forwards = self._warned_graph = False
        self._hooks: list[_core.GradHook] = []
        self._handles: list[torch.utils.hooks.RemovableHandle | None] = []
        self._attached_to = [0] * len(self.params)  # addresses of the tensors' insides, which swapping exchanges
        self._apply_plan()
        for index, param in enumerate(self.params):
            self._hooks.append(self._make_hook(index))
            self._handles.append(None)
            self._attach_hook(index, param)
        table.on_replace = _weakly(self, "_attach_hook")
        self.active = True
        _claim(self)
        _live.add(self)

    # ---- forward

    def before_forward(self) -> None:
        """A forward of the wrapper with gradients enabled begins: raises what the iteration before left to say."""
        self._raise_failure()
        if self._usage_error is not None:
            raise RuntimeError(self._usage_error)
        if not self._is_attached(self._witness):
            self._attach_all()
        self.table.refresh()
        if not self.active:
            _claim(self)

    def after_forward(self, reduce: bool) -> None:
        """It ended; `reduce` says whether the backward that follows is reduced (no_sync: it is not)."""
        if not self.active:
            _claim(self)  # a wrapper inside this one took over meanwhile
        self._reduce_next = reduce
        self._owes_reduction = self._owes_reduction or reduce
        self._forwards += 1

    # ---- arm

    def _on_first_gradient(self) -> None:
        if not self.active:
            return
        if self._arming:
            self._refuse_second_backward()  # this one lost the interpreter to another thread meanwhile
        self._arming = True
        try:
            self._arm()
        finally:
            self._arming = False

    def _arm(self) -> None:
        self._raise_failure()
        self.table.refresh()
        if torch.is_grad_enabled() and not self._warned_graph:
            self._warned_graph = True
            self._warnings.append(_CREATE_GRAPH_TEXT)
        reduce = self.sync_requested() if self._reduce_next is None else self._reduce_next
        if reduce and os.getpid() != self._pid:
            raise RuntimeError(
                "backward in a process that was forked from one whose gradients are reduced: a child cannot take its "
                "place in the group; use the module of the wrapper in it, copied, or no_sync()"
            )
        if reduce:
            self._apply_plan()
            self._free_buckets()
        self._started_on = get_ident() if starts_on_this_thread() else None
        queue_at_outermost_end(BackwardEnd(self._on_backward_end, self._on_backward_aborted))
        self._backwards += 1
        if reduce:
            self.engine.arm()
        else:
            self.engine.arm_local()

    def _plan_next(self, plan: BucketPlan | None) -> None:
        """Has the plan applied when the next iteration is armed, for what the parameters are now, not then."""
        self._next_plan = plan
        self._next_specs = [ParameterSpec.of(p) for p in self.params]

    def _on_moved_gradient(self) -> None:
        """A gradient on another thread than those before it: autograd may go on there, or it is another backward."""
        if not starts_on_this_thread():
            return
        if self._started_on is None:
            self._started_on = get_ident()
        elif self._started_on != get_ident():
            self._refuse_second_backward()

    def _refuse_second_backward(self) -> NoReturn:
        """Its gradients may have been added to what the first one reduces, so that one fails too: on every rank."""
        self._disturbed = True
        raise RuntimeError(_TWO_BACKWARDS_TEXT)

    def _apply_plan(self) -> None:
        plan, self._next_plan = self._next_plan, None
        if plan is None:
            return
        self.plan, self._specs = plan, self._next_specs
        self._memories = [
            BucketMemory(bucket, memory, self._specs)
            for bucket, memory in zip(plan.buckets, allocate_buckets(plan, self.transport), strict=True)
        ]
        self._set_plan()

    def _set_plan(self) -> None:
        buckets = [
            (memory.memory, bucket.dtype, bucket.numel, [(s.parameter, s.offset, s.numel) for s in bucket.slots])
            for bucket, memory in zip(self.plan.buckets, self._memories, strict=True)
        ]
        self.engine.set_plan(buckets, self.plan.layout_hash)
        self._views = [None] * len(self.params)
        self._bucket_of = {}
        for index, (bucket, memory) in enumerate(zip(self.plan.buckets, self._memories, strict=True)):
            for slot in bucket.slots:
                self._views[slot.parameter] = memory.views.pop(slot.parameter)
                self._bucket_of[slot.parameter] = index
        for parameter, hook in enumerate(self._hooks):
            if self._views[parameter] is not None:
                hook.set_layout(self._views[parameter])

    def _view(self, index: int) -> torch.Tensor:
        view = self._views[index]
        assert view is not None
        return view

    def _registration_order_plan(self) -> BucketPlan:
        order = [i for i in reversed(range(len(self.params))) if self.params[i].requires_grad]
        return BucketPlan.build([ParameterSpec.of(p) for p in self.params], order, self.caps)

    def _free_buckets(self) -> None:
        """Gives buckets new memory in which somebody still keeps a gradient, so that it is never overwritten."""
        stale = {self._bucket_of[i] for i in _core.stale_views(self.engine, self.params, self._views, _GRAD_REFERENCES)}
        stale.update(i for i, memory in enumerate(self._memories) if memory.aliased())
        for index in stale:
            bucket = self.plan.buckets[index]
            memory = BucketMemory(bucket, self.transport.allocate(max(bucket.nbytes, 1)), self._specs)
            self.engine.replace_memory(index, memory.memory)
            for parameter in list(memory.views):
                self._views[parameter] = memory.views.pop(parameter)
            self._memories[index] = memory

    # ---- ready

    def _make_hook(self, index: int) -> _core.GradHook:
        first, moved = _weakly(self, "_on_first_gradient"), _weakly(self, "_on_moved_gradient")
        hook = _core.make_grad_hook(self.engine, index, first, moved, _weakly(self, "_on_other_gradient"))
        if self._views[index] is not None:
            hook.set_layout(self._views[index])
        return hook

    def _attach_hook(self, index: int, param: torch.nn.Parameter) -> None:
        """Puts the hook of this index on a parameter, in place of the one that had it before."""
        old, self._handles[index] = self._handles[index], None
        if old is not None:
            old.remove()
        frozen = not param.requires_grad
        if frozen and not (param.is_floating_point() or param.is_complex()):
            return  # it can never have a gradient
        if frozen:
            param.requires_grad_(True)  # a hook can only be registered then
        self._handles[index] = param.register_post_accumulate_grad_hook(self._hooks[index])
        # Set again, because what was swapped into the object (torch.utils.swap_tensors) does not know of its hooks.
        param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
        self._attached_to[index] = param._cdata
        if frozen:
            param.requires_grad_(False)

    def _is_attached(self, index: int) -> bool:
        """Whether the hook of this index is on the object that the module has behind the name."""
        is_same = self._handles[index] is None or self._attached_to[index] == self.params[index]._cdata
        return is_same and self.table.is_in_place(index)

    def _attach_all(self) -> None:
        """Conversions may replace (or swap the insides of) all parameters without telling: then no hook is left."""
        self.table.look_again()
        self.table.refresh()
        for index, param in enumerate(self.params):
            if not self._is_attached(index):
                self._attach_hook(index, param)

    @torch.no_grad()  # under create_graph=True gradients have a graph of their own, which must not reach the buckets
    def _on_other_gradient(self, index: int, param: torch.nn.Parameter) -> None:
        """A gradient that the hook could not simply pack."""
        if index in self._orphans:
            raise RuntimeError(
                f"parameter '{self.names[index]}' got a gradient, but another wrapper that shares parameters with its "
                "wrapper ran the last forward and does not have this one: run backward before another wrapper's "
                "forward, or wrap one module that holds both"
            )
        engine, grad = self.engine, param.grad
        if engine.mode != _core.Mode.REDUCE or grad is None:
            return  # not ours to reduce, or undefined: the parameter was not used
        if grad.layout != torch.strided:
            raise NotImplementedError(f"parameter '{self.names[index]}' has a {grad.layout} gradient")
        view = self._views[index]
        if view is not None and not engine.packed(index) and grad.shape == view.shape and grad.dtype == view.dtype:
            view.copy_(grad)  # another layout in memory
            engine.mark_packed(index)
        else:
            # A second gradient after packing, or one without a fitting slot: linear, so exact when added afterwards.
            self._second_round.add(index, grad)
            engine.request_second_round(index)
        param.grad = None

    # ---- finish

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        if self.engine.mode == _core.Mode.LOCAL:
            self.engine.disarm()
            disturbed, self._disturbed = self._disturbed, False
            if disturbed:
                raise RuntimeError(_TWO_BACKWARDS_TEXT)
            if self._owes_reduction:
                self._reduce_next = None  # a forward of those before was to be reduced: its backward is still to come
            self._give_warnings()
            return
        try:
            self._complete_missing()
            verdict = self._finish_engine(failed=self._disturbed)
            if not verdict.agreed:
                self._resolve(verdict)
            if not verdict.all_used or self.static_graph:
                self._check_usage(verdict)
            _core.install_views(self.engine, verdict, self.params, self._views)
            for index, grad in self._kept.items():
                if not verdict.is_used(index):
                    self._view(index).copy_(grad)
            if not self.plan_is_final and self._next_plan is None:
                self._plan_next(self._plan_in_ready_order())
                self.plan_is_final = True
        except StepFailed:
            raise
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._reset()
        self._give_warnings()

    def _give_warnings(self) -> None:
        """What this backward gave cause for. The last thing it does: where warnings are errors, this raises."""
        texts, self._warnings = self._warnings, []
        for text in texts:
            warnings.warn(text, stacklevel=3)

    def _complete_missing(self) -> None:
        missing = self.engine.missing()
        if not all(map(self._is_attached, missing)):
            detached = [index for index in missing if not self._is_attached(index)]
            self._attach_all()
            for index in detached:
                if self.params[index].grad is not None:
                    self._hooks[index](self.params[index])  # what autograd would have called
            missing = self.engine.missing()
        for index in missing:
            grad, view = self.params[index].grad, self._view(index)
            if grad is None or grad.shape != view.shape or grad.dtype != view.dtype:
                self.engine.complete(index, None)
                continue
            if grad.data_ptr() == view.data_ptr():
                self._kept[index] = grad.clone()
            else:
                view.copy_(grad)
            self.engine.complete(index, view)

    def _finish_engine(self, failed: bool) -> _core.Verdict:
        try:
            return self.engine.finish(backwards=self._backwards, forwards=self._forwards, failed=failed, weight=1.0)
        except (CommTimeout, PeerFailed) as error:
            if (bucket := self.engine.reduced) == len(self.plan.buckets):
                raise
            names = [self.names[slot.parameter] for slot in self.plan.buckets[bucket].slots]
            text = f"{error} (gradients, iteration {self.engine.iteration}, bucket {bucket}: {', '.join(names)})"
            if isinstance(error, PeerFailed):
                raise PeerFailed(text, error.rank, error.reason) from error
            raise CommTimeout(text, error.missing, bucket, names) from error

    def _resolve(self, verdict: _core.Verdict) -> None:
        """The ranks are not all in the plain case. Raises the same on every rank, or makes the gradients complete."""
        ranks = verdict.ranks
        name = self.transport.global_rank
        if any(words.failed for words in ranks):
            texts = self.comm.all_gather_bytes(_TWO_BACKWARDS_TEXT.encode() if self._disturbed else b"")
            raised = [
                f"rank {name(r)}: {text.decode() or 'raised in backward'}"
                for r, (words, text) in enumerate(zip(ranks, texts, strict=True))
                if words.failed
            ]
            raise StepFailed(f"iteration {self.engine.iteration} failed on {'; '.join(raised)}")
        for what in ("iteration", "layout_hash", "backwards"):
            values = [getattr(words, what) for words in ranks]
            if len(set(values)) > 1:
                per_rank = ", ".join(f"{value} on rank {name(r)}" for r, value in enumerate(values))
                raise StepFailed(f"the training loops of the ranks diverged: {_MEANING[what]} is {per_rank}")
        forwards = [words.forwards for words in ranks]
        if len(set(forwards)) > 1 and not self._warned_forwards:
            self._warned_forwards = True
            per_rank = ", ".join(f"{count} on rank {name(r)}" for r, count in enumerate(forwards))
            self._warnings.append(
                f"training forwards since the last reduction differ between ranks: {per_rank}. Gradients are right; "
                "check that every rank runs the same loop."
            )
        indices = verdict.second_round()
        if indices:
            self._second_round.run(self, indices)
            self._plan_next(self._plan_with(indices))

    def add_mean(self, index: int, mean: torch.Tensor) -> None:
        """The second round's mean of a parameter: added to its slot, or its gradient where no slot fits."""
        view = self._views[index]
        if view is not None and view.shape == mean.shape and view.dtype == mean.dtype:
            view.add_(mean)
        elif view is not None:
            self._views[index] = mean.clone()  # installed in place of the slot's, which holds zeros of another kind
        else:
            self.params[index].grad = mean.clone()

    def _check_usage(self, verdict: _core.Verdict) -> None:
        """Parameters that got no gradient on some rank: an error in the next forward unless that was announced.

        Collective: one that is frozen on every rank is no error, one that is frozen on some is one on all of them.
        """
        if self.allow_unused and not self.static_graph:
            return
        used = set(verdict.used_by_all())
        unused = [i for i in self.plan.parameters if i not in used and self._specs[i].numel > 0]
        if unused:
            trainable = self.comm.all_gather_bytes(bytes(self.params[i].requires_grad for i in unused))
            unused = [i for i, flags in zip(unused, zip(*trainable, strict=True), strict=True) if any(flags)]
        if self.static_graph:
            if self._static_usage is None:
                self._static_usage = unused
            elif unused != self._static_usage:
                changed = sorted(set(unused) ^ set(self._static_usage))
                self._usage_error = (
                    "Your training graph has changed in this iteration, while static_graph=True was set: these "
                    f"parameters changed between having and not having a gradient: {self._names_of(changed)}"
                )
        elif unused:
            self._usage_error = _UNUSED_TEXT.format(names=self._names_of(unused), indices=unused)

    def _plan_in_ready_order(self) -> BucketPlan | None:
        """The plan in the order in which rank 0's gradients became ready, the rest last; collective."""
        order = torch.full((len(self.params),), -1, dtype=torch.int32)
        ready = self.engine.ready_order
        order[: len(ready)] = torch.tensor(ready, dtype=torch.int32)
        self.comm.broadcast(order)
        first = [i for i in order.tolist() if i >= 0]
        seen = set(first)
        rest = [i for i in self.plan.parameters if i not in seen]
        plan = BucketPlan.build([ParameterSpec.of(p) for p in self.params], first + rest, self.caps)
        return None if plan == self.plan else plan

    def _plan_with(self, parameters: list[int]) -> BucketPlan | None:
        """The plan in which these parameters have a slot that fits what they are now; None if they have one already.

        Their shapes and dtypes were compared in the second round, so every rank comes to the same plan.
        """
        specs = [ParameterSpec.of(p) for p in self.params]
        order = self.plan.parameters
        present = set(order)
        new = [i for i in parameters if i not in present]
        if not new and all(self._specs[i].is_like(specs[i]) for i in parameters):
            return None
        return BucketPlan.build(specs, order + new, self.caps)

    def _on_backward_aborted(self, find_text: Callable[[], str]) -> None:
        """Backward raised on this rank: keep the peers company to the end of the iteration and tell them."""
        if self.engine.mode != _core.Mode.REDUCE:
            self.engine.disarm()
            return
        try:
            self._raise_failure()
            for index in self.engine.missing():
                self.engine.complete(index, None)
            self._finish_engine(failed=True)
            self.comm.all_gather_bytes(find_text().encode(errors="replace"))
        except BaseException as error:  # nobody to raise to: it is raised by whatever comes next
            self._break(error)
            if isinstance(error, KeyboardInterrupt):
                _thread.interrupt_main()  # this one must not be lost
        finally:
            self._reset()

    def _reset(self) -> None:
        self.engine.disarm()
        self._second_round.clear()
        self._kept.clear()
        self._disturbed = False
        self._backwards = self._forwards = 0
        self._reduce_next = None
        self._owes_reduction = False

    # ---- failure, usage, end

    def _break(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            # A process group may still have an operation on the buckets under way, and no way to call it back.
            if isinstance(self.transport, Transport):
                _abandoned.extend(self._memories)
            self.transport.abort(f"{type(error).__name__}: {error}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CommError(
                f"communication broke down earlier, this wrapper is dead: {self._failure}"
            ) from self._failure

    def check_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before any optimizer steps: it must not apply gradients of an iteration that is not complete."""
        if self.engine.mode != _core.Mode.REDUCE and self._failure is None:
            return
        mine = set(map(id, self.params))
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._raise_failure()
            raise RuntimeError("optimizer.step() inside backward, before its gradients are reduced")

    def _names_of(self, indices: Sequence[int]) -> str:
        return ", ".join(self.names[i] for i in indices)

    def close(self) -> None:
        """Takes the hooks off the parameters and lets go of the transport."""
        self._detach_hooks()
        self.active = False
        self.comm.close()

    def __del__(self) -> None:
        self._detach_hooks()

    def _detach_hooks(self) -> None:
        for handle in getattr(self, "_handles", ()):
            if handle is not None:
                handle.remove()
        self._handles = [None] * len(getattr(self, "_handles", ()))


_MEANING = {
    "iteration": "the number of reductions",
    "layout_hash": "the hash of the bucket plan",
    "backwards": "the number of backwards since the last reduction",
}

# Says what stock DDP says in this situation, so that what scripts and people look for is there, and then the names.
_UNUSED_TEXT = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel, and by making sure all "
    "`forward` function outputs participate in calculating loss. Parameters which did not receive grad in the prior "
    "iteration: {names}. Parameter indices which did not receive grad: {indices}. (The gradients of that iteration "
    "were reduced over all ranks.)"
)

_TWO_BACKWARDS_TEXT = (
    "two backwards at once, on two threads, through one DistributedDataParallel: their gradients cannot be told apart. "
    "Run one after the other, or wrap a copy of the module for each thread"
)

_CREATE_GRAPH_TEXT = (
    "backward(create_graph=True) through DistributedDataParallel: the gradients are reduced, but the reduced .grad has "
    "no graph, so a second derivative cannot flow through it. Use torch.autograd.grad(..., create_graph=True) for that."
)

# Memory that outlives its wrapper, because something may still be written to it.
_abandoned: list[BucketMemory] = []

_live: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _claim(reducer: Reducer) -> None:
    """Makes this the only active one among those that share parameters: the wrapper that ran the last forward."""
    mine = set(map(id, reducer.params))
    for other in _live:
        if other is not reducer and any(id(p) in mine for p in other.params):
            other.active = False
            other._orphans = frozenset(i for i, p in enumerate(other.params) if id(p) not in mine)
    reducer.active = True
    reducer._orphans = frozenset()


def _check_live(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for reducer in _live:
        reducer.check_before_step(optimizer)


register_optimizer_step_pre_hook(_check_live)


def _weakly(owner: Reducer, method: str) -> Callable:
    """The bound method without keeping its owner alive; does nothing once it is gone."""
    reference = weakref.ref(owner)

    def call(*args: object) -> None:
        target = reference()
        if target is not None:
            getattr(target, method)(*args)

    return call


def _count_grad_references() -> int:
    """References a tensor gains by being some parameter's `.grad`: differs between versions of torch."""
    param, grad = torch.nn.Parameter(torch.empty(1)), torch.empty(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


_GRAD_REFERENCES = _count_grad_references()
