"""The reduction of one wrapper's gradients, iteration after iteration: policy around the engine.

    arm       first gradient of a backward: is it reduced or local, are the buckets free, is there a new plan
    ready     gradient after gradient: packed by the hook in C; here only what is not the plain case
    finish    outermost end of backward: slots without a gradient, the ranks' verdict, a second round, views into .grad

The other stages have files of their own: comm_hooks.py what may take the transport's place, weights.py and verdict.py
the mean that the ranks agree on, finite.py what is not finite.

Every parameter, frozen ones too, has an index from construction on. Whatever concerns more than this rank is decided
from the verdict, which is the same on all of them.
"""

import _thread
import contextlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import get_ident
from typing import NoReturn

import torch
import torch.distributed as dist

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.errors import CommError, CommTimeout, PeerFailed, StepFailed, text_of
from gpucomm.reduction.backward import BackwardEnd, queue_at_outermost_end, starts_on_this_thread
from gpucomm.reduction.buckets import BucketMemory, BucketPlan
from gpucomm.reduction.comm_hooks import (
    CommHooks,
    Hook,
    HookNotes,
    PeerHookRaised,
    collectives_issued,
    first_uneven_group,
)
from gpucomm.reduction.finite import FiniteCheck
from gpucomm.reduction.forecast import Forecast
from gpucomm.reduction.graph import with_graph
from gpucomm.reduction.hooks import Hooks
from gpucomm.reduction.local import local_grad, placed_like
from gpucomm.reduction.parameters import ParameterTable
from gpucomm.reduction.second_round import SecondRound
from gpucomm.reduction.sharing import claim, enlist, retire
from gpucomm.reduction.slots import Slots
from gpucomm.reduction.usage import Usage
from gpucomm.reduction.verdict import check_loops, differing_forwards, mean_factor
from gpucomm.reduction.weights import Weight
from gpucomm.reduction.wire import Wire
from gpucomm.transport import Transport


class Reducer:
    """Owns the engine, the slots and the hooks of the parameters of one wrapper.

    table: all parameters of the module, the same on every rank. caps, plan, delayed, skip_unused: see Slots.
    timeout_s: for waits that are not the transport's.
    piece_bytes: buckets are packed and reduced in pieces of this size, 0: each as a whole.
    allow_unused, static_graph: see Usage. nonfinite: see FiniteCheck. wire: how gradients travel, see Wire.
    comm: brings the transport; collectives of the wrapper and of the engine come in one order on its stream.
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
        timeout_s: float,
        allow_unused: bool,
        static_graph: bool,
        nonfinite: str = "pass",
        plan: BucketPlan | None = None,
        delayed: Collection[int] = (),
        skip_unused: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.table = table
        self.params = table.params
        self._timeout_s = timeout_s
        self.names = table.names
        self.comm = comm
        self.transport = transport
        self.trace = _core.Trace()
        self.engine = _core.Engine(transport, stream, self.trace, len(self.params), piece_bytes=piece_bytes)
        self.slots = Slots(
            self.params, self.engine, transport, caps, plan, wire or Wire(), table.sparse, delayed, skip_unused
        )
        self.sync_requested: Callable[[], bool] = lambda: True

        self.weight = Weight()
        self.finite = FiniteCheck(nonfinite, self.names, self.engine)
        self.comm_hooks: CommHooks | None = None
        self.joined = False  # keeps its peers company, without data of its own
        self.mean_of_active = False  # ranks that have joined do not count in the mean
        self._usage = Usage(self.names, allow_unused=allow_unused, static_graph=static_graph)
        self._second_round = SecondRound()
        self._slotless_means: dict[int, torch.Tensor] = {}  # of the second round, for parameters without a fitting slot
        self._sparse_means: dict[int, torch.Tensor] = {}
        self._graphed: dict[int, torch.Tensor] | None = None  # this rank's own gradients, if they have a graph
        self._had_graph = False
        self._forecast = Forecast(self.params)
        self._absent: list[int] = []  # parameters that were forecast to get no gradient in this backward
        self._kept: dict[int, torch.Tensor] = {}  # .grad of parameters that nobody may have used this time
        self._backwards = 0  # since the last reduction, local ones too
        self._forwards = 0  # training forwards of the wrapper since then
        self._reduce_next: bool | None = None  # what the wrapper's last forward asked for
        self._announced = False  # the program said that the next backward is to be reduced, and none was since
        self._owes_reduction = False  # one of the forwards since the last reduction asked for one
        self.orphans: frozenset[int] = frozenset()  # while not active: parameters that the active wrapper lacks
        self._witness = next(i for i, p in enumerate(self.params) if p.requires_grad)
        self._end: Callable[[], BackwardEnd | None] = lambda: None  # of the backward that is under way
        self._started_on: int | None = None  # the thread whose program called backward, as far as seen
        self._arming = False
        self._fault: Exception | None = None  # for which this iteration fails, though backward may come to its end
        self._spoiled = False  # the last iteration failed: what is left in .grad is not to be applied
        self._pid = os.getpid()
        self._failure: BaseException | None = None  # communication is broken for good
        self._warnings: list[str] = []  # given once the iteration is complete
        self._warned_forwards = False
        self._hooks = Hooks(table, self._make_hook)
        self._hooks.set_layouts(self.slots.views, self.slots.wire)
        table.on_replace = _weakly(self, "_on_replaced_parameter")
        self.on_reduced: list[Callable[[], None]] = []  # each is called once, when the next reduction is complete
        self.on_backward: Callable[[bool], None] = lambda reduced: None  # before its gradients are completed
        self.on_error: Callable[[str], None] = lambda text: None  # is told what an iteration raises
        self.active = True
        enlist(self)
        claim(self)

    @property
    def plan(self) -> BucketPlan:
        """The plan in force."""
        return self.slots.plan

    # ---- forward

    def before_forward(self) -> None:
        """A forward of the wrapper with gradients enabled begins: raises what the iteration before left to say."""
        self.check_finished()
        if not self._hooks.is_attached(self._witness):
            self._hooks.attach_all()
        self.table.refresh()
        if not self.active:
            claim(self)

    def before_collective(self) -> None:
        """The program asks for a collective of the wrapper: not inside a backward, with whose own it would mix.

        Raises what the iteration before left to say, and RuntimeError inside a backward.
        """
        self._notice_abandoned_backward()
        self._raise_failure()
        if self.engine.mode != _core.Mode.IDLE:
            raise RuntimeError("a collective of DistributedDataParallel inside backward: call it before or after")
        self.table.refresh()

    def check_finished(self) -> None:
        """Raises RuntimeError if the iteration before was not reduced as it should have been."""
        self._notice_abandoned_backward()
        try:
            self._raise_failure()
            if self._usage.error is not None:
                raise RuntimeError(self._usage.error)
        except RuntimeError as error:
            self.on_error(str(error))
            raise

    def expect_reduction(self) -> None:
        """The backward that follows is reduced, whatever the last forward asked for."""
        if not self.active:
            claim(self)
        self._reduce_next = self._owes_reduction = self._announced = True

    def _notice_abandoned_backward(self) -> None:
        """A backward of this thread raised where nothing told of it: the graph is still kept, and its end with it."""
        if self.engine.mode == _core.Mode.IDLE or self._started_on != get_ident():
            return
        if torch._C._current_graph_task_id() == -1 and (end := self._end()) is not None:
            end.abort()

    def after_forward(self, reduce: bool) -> None:
        """It ended; `reduce` says whether the backward that follows is reduced (no_sync: it is not)."""
        if not self.active:
            claim(self)  # a wrapper inside this one took over meanwhile
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
        reduce = self.sync_requested() if self._reduce_next is None else self._reduce_next
        if reduce and os.getpid() != self._pid:
            raise RuntimeError(
                "backward in a process that was forked from one whose gradients are reduced: a child cannot take its "
                "place in the group; use the module of the wrapper in it, copied, or no_sync()"
            )
        if reduce:
            self._ready_slots()
        self._started_on = get_ident() if starts_on_this_thread() else None
        end = BackwardEnd(self._on_backward_end, self._on_backward_aborted)
        self._end = weakref.ref(end)
        queue_at_outermost_end(end)
        self._backwards += 1
        if reduce:
            self.engine.arm()
            self._graphed = {} if torch.is_grad_enabled() and self.comm_hooks is None else None
            self._had_graph = self._had_graph or self._graphed is not None
            self.engine.set_by_hand(self._graphed is not None)
            self._complete_absent()
        else:
            self.engine.arm_local()

    def _complete_absent(self) -> None:
        """Slots that get no gradient in this backward do not keep those behind them waiting."""
        self._absent = []
        if self._usage.is_worth_forecasting and self.comm_hooks is None:
            self._absent = self._forecast.absent(self.slots.expected())
            for index in self._absent:
                self._complete(index)

    def _ready_slots(self) -> None:
        if self.slots.apply_next():
            self._hooks.set_layouts(self.slots.views, self.slots.wire)
        self.slots.free()
        if self.comm_hooks is not None:
            self.comm_hooks.hold_back()
        if self._had_graph:
            for bucket in range(len(self.plan.buckets)):
                self.engine.hold_back(bucket)

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
        self._fault = RuntimeError(_TWO_BACKWARDS_TEXT)
        raise self._fault

    # ---- ready

    def _make_hook(self, index: int) -> _core.GradHook:
        first, moved = _weakly(self, "_on_first_gradient"), _weakly(self, "_on_moved_gradient")
        return _core.make_grad_hook(self.engine, index, first, moved, _weakly(self, "_on_other_gradient"))

    def _on_replaced_parameter(self, index: int, param: torch.nn.Parameter) -> None:
        self._hooks.attach(index, param)

    @torch.no_grad()  # under create_graph=True gradients have a graph of their own, which must not reach the buckets
    def _on_other_gradient(self, index: int, param: torch.nn.Parameter) -> None:
        """A gradient that the hook could not simply pack."""
        if index in self.orphans:
            raise RuntimeError(
                f"parameter '{self.names[index]}' got a gradient, but another wrapper that shares parameters with its "
                "wrapper ran the last forward and does not have this one: run backward before another wrapper's "
                "forward, or wrap one module that holds both"
            )
        engine = self.engine
        if engine.mode != _core.Mode.REDUCE or (grad := local_grad(param)) is None:
            return  # not ours to reduce, or undefined: the parameter was not used
        is_last, view = self._hooks.comes_last(index), self.slots.fitting_view(index, grad)
        if self._graphed is not None and (is_last or engine.packed(index)):
            with torch.enable_grad():
                self._graphed[index] = self._graphed[index] + grad if index in self._graphed else grad
            grad = grad.detach()
        if not is_last and not engine.packed(index):
            engine.mark_used(index)  # what the hooks that follow make of it is taken at the end of backward
            return
        if view is not None and not engine.packed(index):
            view.copy_(grad)  # another layout in memory, or hooks of the program came before
            engine.mark_packed(index)
        elif view is not None and self.comm_hooks is not None:
            if not self.comm_hooks.add_late(index, grad):
                self._fault = RuntimeError(
                    f"parameter '{self.names[index]}' got a second gradient in one backward after the communication "
                    "hook had taken its first; from the next iteration on its bucket waits for the end of backward"
                )
        else:
            if view is not None and not engine.used(index):
                self._forecast.note_wrong()
            # A second gradient after packing, or one without a fitting slot: linear, so exact when added afterwards.
            self._send_apart(index, grad)
        param.grad = None

    def _send_apart(self, index: int, grad: torch.Tensor) -> None:
        self._second_round.add(index, grad)
        self.engine.request_second_round(index)

    # ---- finish

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        self.on_backward(self.engine.mode == _core.Mode.REDUCE)
        if self.engine.mode == _core.Mode.LOCAL:
            self.engine.disarm()
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault
            if self._owes_reduction:
                self._reduce_next = None  # a forward of those before was to be reduced: its backward is still to come
            self._give_warnings()
            return
        try:
            if not self.joined:
                with self._usage.search_range():
                    self._complete_missing()
            self._finish()
        except StepFailed as error:
            self._spoiled = True
            self.on_error(text_of(error))
            raise
        except BaseException as error:
            self.on_error(text_of(error))
            self._break(error)
            raise
        finally:
            self._reset()
        due, self.on_reduced = self.on_reduced, []
        for callback in due:
            callback()
        if (text := self._usage.change) is not None:
            self._usage.change = None
            self.on_error(text)
            raise RuntimeError(text)
        self._give_warnings()

    def _finish(self) -> None:
        verdict = self._reduce(failed=self._fault is not None)
        factor = 1.0 if verdict.agreed else self._agree(verdict)
        if self.comm_hooks is not None and not self._shares_group:
            self.comm_hooks.finish()
        if second := verdict.second_round():
            self._second_round.run(self, second)
            self.slots.plan_for(second, self._sparse_means)
        if factor != 1.0:
            self._scale(factor)
        # With communication hooks the ranks may each have something else.
        means = iter(()) if self.comm_hooks is not None else self._means(verdict)
        self.finite.judge(verdict, means, self.transport.global_rank)
        self._usage.note(verdict)
        if not verdict.all_used or self._usage.static_graph:
            self._usage.check(verdict, self.slots.expected(), self)
        if not self.joined:
            self._unpack(verdict)
            if self._graphed is not None:
                self._give_graph(verdict, factor)
        if not self.slots.is_final and self.slots.next_plan is None:
            self.slots.plan_ready_order(self.comm, verdict)
        self._spoiled = False

    def _scale(self, factor: float) -> None:
        for memory in self.slots.memories:
            memory.scale(factor)
        for mean in (*self._slotless_means.values(), *self._sparse_means.values()):
            mean.mul_(factor)

    def _means(self, verdict: _core.Verdict) -> Iterator[tuple[int, torch.Tensor]]:
        yield from ((i, self.slots.view(i)) for i in self.plan.parameters if verdict.is_used(i))
        yield from self._slotless_means.items()
        yield from ((i, mean._values()) for i, mean in self._sparse_means.items())

    def _unpack(self, verdict: _core.Verdict) -> None:
        """Gives every parameter that was used on some rank its mean as `.grad`."""
        for index, mean in (*self._slotless_means.items(), *self._sparse_means.items()):
            grad = placed_like(self.params[index], mean)
            if self.slots.views[index] is not None:
                self.slots.substitute(index, grad)
            else:
                self.params[index].grad = grad
        _core.install_views(self.engine, verdict, self.params, self.slots.grads)
        for index, kept in self._kept.items():
            if not verdict.is_used(index):
                self.slots.view(index).copy_(kept)

    def _give_graph(self, verdict: _core.Verdict, factor: float) -> None:
        """The reduced gradients become functions of this rank's own, so that a derivative of theirs can be taken."""
        used = [i for i in verdict.used() if (grad := self.params[i].grad) is not None and grad.layout == torch.strided]
        means = [mean for i in used if (mean := self.params[i].grad) is not None]
        own = [(self._graphed or {}).get(i, torch.zeros_like(mean)) for i, mean in zip(used, means, strict=True)]
        for index, grad in zip(used, with_graph(means, own, factor, self.comm), strict=True):
            self.params[index].grad = grad

    def _give_warnings(self) -> None:
        """What this backward gave cause for. The last thing it does: where warnings are errors, this raises."""
        texts, self._warnings = self._warnings, []
        for text in texts:
            warnings.warn(text, stacklevel=3)

    def _complete_missing(self) -> None:
        missing = self.engine.missing()
        if not all(map(self._hooks.is_attached, missing)):
            detached = [index for index in missing if not self._hooks.is_attached(index)]
            self._hooks.attach_all()
            for index in detached:
                if self.params[index].grad is not None:
                    self._hooks.call(index)
            missing = self.engine.missing()
        self._usage.note_here(sorted(missing + self._absent))
        for index in missing:
            self._complete(index)
        for index in (*missing, *self.slots.slotless):
            grad = local_grad(self.params[index])
            if grad is not None and self.engine.used(index) and self.slots.fitting_view(index, grad) is None:
                # Accumulated under no_sync, or left to hooks of the program, and does not fit.
                self._send_apart(index, grad)
                self.params[index].grad = None

    def _complete(self, index: int) -> None:
        """Packs what `.grad` holds of a parameter that gets no gradient in this backward, else zeros."""
        grad = local_grad(self.params[index])
        view = self.slots.fitting_view(index, grad) if grad is not None else None
        if grad is None or view is None:
            self.engine.complete(index, None)
            return
        if grad.data_ptr() == view.data_ptr():
            self._kept[index] = grad.clone()
        else:
            view.copy_(grad)
        self.engine.complete(index, view)

    def _reduce(self, failed: bool) -> _core.Verdict:
        """Launches what is left, exchanges the headers and waits; for communication hooks only if _shares_group."""
        if self.comm_hooks is not None:
            try:
                self.engine.launch_rest()
                if self._shares_group:
                    self.comm_hooks.finish()
            except Exception as error:
                if self._shares_group:
                    raise CommError(f"a communication hook raised: {text_of(error)}") from error
                if not isinstance(error, PeerHookRaised):
                    self._fault, failed = error, True
        return self._exchange_headers(failed)

    @property
    def _shares_group(self) -> bool:
        """Whether communication hooks may use the group that the transport uses: never both at a time."""
        return isinstance(self.transport, Transport)

    def _exchange_headers(self, failed: bool) -> _core.Verdict:
        try:
            return self.engine.finish(
                backwards=self._backwards,
                forwards=self._forwards,
                failed=failed,
                joined=self.joined,
                weight=self.weight.total,
                nonfinite=self.engine.nonfinite_parameter,
            )
        except (CommTimeout, PeerFailed) as error:
            if (bucket := self.engine.reduced) == len(self.plan.buckets):
                raise
            names = [self.names[slot.parameter] for slot in self.plan.buckets[bucket].slots]
            text = f"{error} (gradients, iteration {self.engine.iteration}, bucket {bucket}: {', '.join(names)})"
            if isinstance(error, PeerFailed):
                raise PeerFailed(text, error.rank, error.reason) from error
            raise CommTimeout(text, error.missing, bucket, names) from error

    def _agree(self, verdict: _core.Verdict) -> float:
        """The ranks are not all in the plain case. Raises the same on every rank; else the factor of the mean."""
        name_of = self.transport.global_rank
        if any(words.failed for words in verdict.ranks):
            texts = self._share_failure("" if self._fault is None else text_of(self._fault))
            raised = [
                f"rank {name_of(r)}: {text or 'raised in backward'}"
                for r, (words, text) in enumerate(zip(verdict.ranks, texts, strict=True))
                if words.failed
            ]
            raise StepFailed(f"iteration {self.engine.iteration} failed on {'; '.join(raised)}") from self._fault
        check_loops(verdict, name_of)
        per_rank = differing_forwards(verdict, name_of)
        if per_rank is not None and not self._warned_forwards:
            self._warned_forwards = True
            self._warnings.append(
                f"training forwards since the last reduction differ between ranks: {per_rank}. Gradients are right; "
                "check that every rank runs the same loop."
            )
        return mean_factor(verdict, self.mean_of_active, name_of)

    def _share_failure(self, text: str) -> list[str]:
        """What each rank says of an iteration that failed; collective. Communication hooks in flight are waited for.

        Raises CommError if a hook raised on some ranks and not on others, with collectives that nobody answers.
        """
        hooks = self.comm_hooks
        mine = {"text": text, "issued": collectives_issued() if hooks is not None and not self._shares_group else {}}
        everybody = [json.loads(words) for words in self.comm.all_gather_bytes(json.dumps(mine).encode())]
        texts = [words["text"] for words in everybody]
        if (group := first_uneven_group([words["issued"] for words in everybody])) is not None:
            raise CommError(
                f"a communication hook raised on some ranks only ({'; '.join(filter(None, texts))}) and left "
                f"collectives of process group {group} that are not answered: make the group and the wrapper anew"
            )
        if hooks is not None and not self._shares_group:
            hooks.drain()
        return texts

    def add_mean(self, index: int, mean: torch.Tensor) -> None:
        """The second round's mean of a parameter: added to its slot, or its gradient where no slot fits."""
        if mean.layout != torch.strided:
            self._sparse_means[index] = mean
        elif (view := self.slots.fitting_view(index, mean)) is not None:
            view.add_(mean)
        else:
            self._slotless_means[index] = mean.clone()

    def _on_backward_aborted(self, find_text: Callable[[], str]) -> None:
        """Backward raised on this rank: keep the peers company to the end of the iteration and tell them."""
        if self.engine.mode != _core.Mode.REDUCE:
            self.engine.disarm()
            self._fault = None
            return
        self._spoiled = True
        try:
            self._raise_failure()
            for index in self.engine.missing():
                self.engine.complete(index, None)
            self._reduce(failed=True)
            try:
                text = find_text()
            except Exception:  # peers wait for what follows
                text = ""
            self._share_failure(text)
        except BaseException as error:  # nobody to raise to: it is raised by whatever comes next
            self._break(error)
            if isinstance(error, KeyboardInterrupt):
                _thread.interrupt_main()  # this one must not be lost
        finally:
            self._reset()

    def _reset(self) -> None:
        self.engine.disarm()
        self._second_round.clear()
        self._slotless_means.clear()
        self._sparse_means.clear()
        self._kept.clear()
        self._graphed = None
        self._fault = None
        self.weight.clear()
        if self.comm_hooks is not None:
            self.comm_hooks.reset()
        self._backwards = self._forwards = 0
        self._reduce_next = None
        self._owes_reduction = self._announced = False

    # ---- failure, end

    def _break(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            # A process group may still have an operation on the buckets under way, and no way to call it back.
            if isinstance(self.transport, Transport) or self.comm_hooks is not None:
                _abandoned.extend(self.slots.memories)
            with contextlib.suppress(Exception):  # of a transport in Python: the failure that led here counts
                self.transport.abort(text_of(error))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CommError(
                f"communication broke down earlier, this wrapper is dead: {text_of(self._failure)}"
            ) from self._failure

    def check_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before any optimizer steps: it must not apply gradients of an iteration that is not complete."""
        unfinished = self.engine.mode == _core.Mode.REDUCE and self.comm_hooks is None  # hooks may step optimizers
        if not (unfinished or self._failure or self._spoiled or self._announced or self.finite.skipping):
            return
        self._notice_abandoned_backward()
        indices = {id(p): i for i, p in enumerate(self.params)}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in indices]
        if not mine:
            return
        if unfinished or self._failure:
            self._raise_failure()
            raise RuntimeError("optimizer.step() before the gradients are reduced: inside backward, or after it raised")
        if self.finite.skipping:
            for param in mine:
                param.grad = None
        elif left := [p for p in mine if p.grad is not None]:
            text = _FAILED_TEXT if self._spoiled else _ANNOUNCED_TEXT
            raise RuntimeError(text.format(name=self.names[indices[id(left[0])]]))

    def keep_company(self) -> None:
        """One iteration of a rank that has joined: reduces zeros with its peers, and leaves `.grad` alone."""
        self._raise_failure()
        self._ready_slots()
        self.engine.arm()
        for index in self.engine.missing():
            self.engine.complete(index, None)
        self._on_backward_end()

    def add_comm_hook(self, state: object, hook: Hook, caps: Sequence[int], group: dist.ProcessGroup) -> None:
        """Has buckets reduced by the hook; a further one gets what those before made of them. Collective, between
        iterations. caps: of the buckets that hooks get."""
        if self.comm_hooks is None:
            notes = HookNotes(group)
            self.comm_hooks = CommHooks(self.slots, self.params, self.engine, notes, self._timeout_s)
            self.engine.hand_over_to(self.comm_hooks.take)
            self.slots.plan_without_gaps(caps)
        self.comm_hooks.add(state, hook)

    def set_static_graph(self) -> None:
        """Which parameters are used is the same in all iterations from now on."""
        self._usage.static_graph = True

    @property
    def unused_here(self) -> list[int]:
        """Parameters that have a slot and got no gradient on this rank in the last reduction."""
        return self._usage.here

    @property
    def graph_is_static(self) -> bool:
        """Whether the same parameters were used by all ranks in every iteration so far."""
        return self._usage.is_constant

    def call_hook(self, index: int) -> None:
        """What autograd does when the parameter's gradient is accumulated."""
        self._hooks.call(index)

    def detach_hooks(self) -> None:
        """Gradients stay local from now on, and nothing is raised about them."""
        self._hooks.detach()

    def close(self) -> None:
        """Takes the hooks off the parameters and lets go of the transport."""
        self._hooks.detach()
        retire(self)
        self.comm.close()

    def __del__(self) -> None:
        if (hooks := getattr(self, "_hooks", None)) is not None:  # construction may have failed before
            hooks.detach()


_TWO_BACKWARDS_TEXT = (
    "two backwards at once, on two threads, through one DistributedDataParallel: their gradients cannot be told apart. "
    "Run one after the other, or wrap a copy of the module for each thread"
)

_FAILED_TEXT = (
    "optimizer.step() after an iteration that failed: parameter '{name}' has a gradient of this rank alone; call "
    "zero_grad() and repeat the iteration"
)

_ANNOUNCED_TEXT = (
    "optimizer.step() after reducer.prepare_for_backward(), but no backward was reduced since: parameter '{name}' has "
    "a gradient of this rank alone. A backward that is split, as by the zero-bubble schedules of torch's pipelining or "
    "by torch.autograd.grad(), calls no gradient hooks"
)

# Memory that outlives its wrapper, because something may still be written to it.
_abandoned: list[BucketMemory] = []


def _weakly(owner: Reducer, method: str) -> Callable:
    """The bound method without keeping its owner alive; does nothing once it is gone."""
    reference = weakref.ref(owner)

    def call(*args: object) -> None:
        target = reference()
        if target is not None:
            getattr(target, method)(*args)

    return call
