"""The reduction of one wrapper's gradients, iteration after iteration: policy around the engine.

    arm       first gradient of a backward: is it reduced or local, are the buckets free, is there a new plan
    ready     gradient after gradient: packed by the hook in C; here only what is not the plain case
    finish    outermost end of backward: slots without a gradient, the ranks' verdict, a second round, views into .grad

completion.py has the slots without a gradient, agreement.py and verdict.py what the ranks tell each other,
comm_hooks.py what may take the transport's place, unpack.py the means on their way into `.grad`.

Every parameter, frozen ones too, has an index from construction on. Whatever concerns more than this rank is decided
from the verdict, which is the same on all of them.
"""

import _thread
import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.errors import CommError, StepFailed, text_of
from gpucomm.gpus import Gpus
from gpucomm.reduction.agreement.finite import FiniteCheck
from gpucomm.reduction.agreement.headers import Agreement
from gpucomm.reduction.backward import BackwardEnd, OneBackward, TwoBackwards, queue_at_outermost_end
from gpucomm.reduction.capture import Captures
from gpucomm.reduction.comm_hooks import CommHooks, Hook, HookNotes
from gpucomm.reduction.completion import Completion
from gpucomm.reduction.engine import make_engine
from gpucomm.reduction.hooks import Hooks
from gpucomm.reduction.layout.arena import make_arena
from gpucomm.reduction.layout.buckets import BucketMemory, BucketPlan
from gpucomm.reduction.layout.grads import kept_grads
from gpucomm.reduction.layout.local import local_grad
from gpucomm.reduction.layout.parameters import ParameterTable
from gpucomm.reduction.layout.slots import Slots
from gpucomm.reduction.layout.wire import Wire
from gpucomm.reduction.loop import Loop
from gpucomm.reduction.norm import MeansNorm
from gpucomm.reduction.second_round import SecondRound
from gpucomm.reduction.sharing import claim, enlist, retire
from gpucomm.reduction.unpack import Means
from gpucomm.reduction.usage import Usage
from gpucomm.transport import Transport


class Reducer:
    """Owns the engine, the slots and the hooks of the parameters of one wrapper.

    table: all parameters of the module, the same on every rank. caps, plan, delayed, skip_unused: see Slots.
    timeout_s: for waits that are not the transport's.
    piece_bytes: buckets are packed and reduced in pieces of this size, 0: each as a whole.
    allow_unused, static_graph: see Usage. nonfinite: see FiniteCheck. wire: how gradients travel, see Wire.
    comm: brings the transport; collectives of the wrapper and of the engine come in one order on its stream.
    overlap: False: buckets wait for the end of backward.
    gpus: the parameters are there; then transport and stream are what the hosts tell each other by.
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
        gpus: Gpus | None = None,
        overlap: bool = True,
    ) -> None:
        self.table = table
        self.params = table.params
        self._timeout_s = timeout_s
        self.names = table.names
        self.comm = comm
        self.transport = transport
        self._gpus = gpus
        self._captures = Captures(gpus)
        self._transports = [transport, *([gpus.transport] if gpus else [])]
        self.trace = _core.Trace()
        self.engine = make_engine(self.params, transport, stream, self.trace, piece_bytes, gpus)
        self.slots = Slots(
            self.params,
            self.engine,
            make_arena(transport, comm, gpus),
            caps,
            plan,
            wire or Wire(),
            table.sparse,
            delayed,
            skip_unused,
            held=not overlap,
        )
        self.sync_requested: Callable[[], bool] = lambda: True

        self.finite = FiniteCheck(nonfinite, self.names, self.engine)
        rank = transport.global_rank(transport.rank)
        self._usage = Usage(self.params, self.names, comm, rank, allow_unused=allow_unused, static_graph=static_graph)
        self.loop = Loop()
        self._means = Means(self.slots, self.params, self.engine)
        self.norm = MeansNorm(self.params, self.slots, self.engine, gpus)
        self._second_round = SecondRound(self.params, self.names, self.engine, comm, transport)
        self.agreement = Agreement(self.engine, self.slots, self.names, comm, transport, self.loop)
        self._hooks = Hooks(table, self._make_hook)
        self._hooks.set_layouts(self.slots.views, self.slots.wire)
        self._completion = Completion(
            self.params, self.engine, self.slots, self._hooks, self._usage, self._means, self._second_round
        )
        table.on_replace = _weakly(self, "_on_replaced_parameter")

        self.orphans: frozenset[int] = frozenset()  # while not active: parameters that the active wrapper lacks
        self._witness = next(i for i, p in enumerate(self.params) if p.requires_grad)
        self._end: Callable[[], BackwardEnd | None] = lambda: None  # of the backward that is under way
        self._one_backward = OneBackward()
        self._failure: BaseException | None = None  # communication is broken for good
        self._pid = os.getpid()
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

    @property
    def comm_hooks(self) -> CommHooks | None:
        """What reduces buckets in the transport's place, if the program registered a hook."""
        return self.agreement.comm_hooks

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
        self.notice_abandoned_backward()
        self.raise_failure()
        if self.engine.mode != _core.Mode.IDLE:
            raise RuntimeError("a collective of DistributedDataParallel inside backward: call it before or after")
        self.table.refresh()

    def check_finished(self) -> None:
        """Raises RuntimeError if the iteration before was not reduced as it should have been."""
        self.notice_abandoned_backward()
        try:
            self.raise_failure()
            if self._usage.error is not None:
                raise RuntimeError(self._usage.error)
        except RuntimeError as error:
            self.on_error(str(error))
            raise

    def expect_reduction(self) -> None:
        """The backward that follows is reduced, whatever the last forward asked for."""
        if not self.active:
            claim(self)
        self.loop.expect_reduction()

    def notice_abandoned_backward(self) -> None:
        """A backward of this thread raised where nothing told of it: the graph is still kept, and its end with it."""
        if self.engine.mode == _core.Mode.IDLE or not self._one_backward.was_started_here():
            return
        if torch._C._current_graph_task_id() == -1 and (end := self._end()) is not None:
            end.abort()

    def after_forward(self, reduce: bool) -> None:
        """It ended; `reduce` says whether the backward that follows is reduced (no_sync: it is not)."""
        if not self.active:
            claim(self)  # a wrapper inside this one took over meanwhile
        self.loop.note_forward(reduce)

    # ---- arm

    def _on_first_gradient(self, index: int) -> None:
        if not self.active:
            return
        with self._refusing_two(), self._one_backward.begin():
            self._arm(index)

    def _arm(self, first: int) -> None:
        self.raise_failure()
        stranger = self._find_stranger()
        reduce = self.sync_requested() if self.loop.reduce_next is None else self.loop.reduce_next
        if reduce and os.getpid() != self._pid:
            raise RuntimeError(
                "backward in a process that was forked from one whose gradients are reduced: a child cannot take its "
                "place in the group; use the module of the wrapper in it, copied, or no_sync()"
            )
        if self._captures.is_under_way():
            self._captures.begin(self.slots, self.finite, self.agreement)
        if reduce:
            self._ready_slots()
        self._one_backward.note_thread()
        end = BackwardEnd(self._on_backward_end, self._on_backward_aborted)
        self._end = weakref.ref(end)
        queue_at_outermost_end(end)
        if self.loop.is_incomplete and self.agreement.weight.total is None and not kept_grads(self.params, first):
            self.loop.begin_again()
        if self.loop.backwards == 0:
            self.agreement.weight.note_kept(self.params, first)
        elif self.agreement.weight.total is not None and self._were_dropped(first):
            self.agreement.weight.begin_again()
            self.loop.begin_again()
        self.loop.backwards += 1
        if reduce:
            self.engine.arm()
        else:
            self.finite.note_local()
            self.engine.arm_local()
        if stranger is not None:
            raise stranger  # only now: the peers of a reduction are told of what raises in it
        if reduce:
            self._arm_stages(first)

    def _arm_stages(self, first: int) -> None:
        hooked = self.comm_hooks is not None  # they need not be linear: what is late is not for them
        with_graph = torch.is_grad_enabled()
        if with_graph:
            self.agreement.check_graph()
        self._means.arm(with_graph and not hooked)
        self._means.note_programs(first)
        self._second_round.ask_about_replaced()
        self._completion.complete_absent(may_be_wrong=not hooked)

    def _find_stranger(self) -> RuntimeError | None:
        """The error if the module has a parameter that was not there at construction."""
        try:
            self.table.refresh()
        except RuntimeError as error:
            return error
        return None

    def _were_dropped(self, first: int) -> bool:
        """Whether nothing is left of what this iteration's backwards gave. first: whose gradient came already."""
        used = [i for i in range(len(self.params)) if i != first and self.engine.used(i)]
        return bool(used) and not set(used) & set(kept_grads(self.params, first))

    def _ready_slots(self) -> None:
        self.finite.forget()
        if self.slots.apply_next():
            self._hooks.set_layouts(self.slots.views, self.slots.wire)
            self.slots.warm_up()
        self.slots.free()
        if self.comm_hooks is not None:
            self.comm_hooks.hold_back()
        self._means.hold_back()

    def _on_moved_gradient(self) -> None:
        """A gradient on another thread than those before it: autograd may go on there, or it is another backward."""
        with self._refusing_two():
            self._one_backward.check_thread()

    @contextlib.contextmanager
    def _refusing_two(self) -> Iterator[None]:
        """Gradients of a second backward may have been added to the first one's, so that one fails too: everywhere."""
        try:
            yield
        except TwoBackwards as error:
            self.agreement.fault = error
            raise

    # ---- ready

    def _make_hook(self, index: int) -> _core.GradHook:
        first, moved = _weakly(self, "_on_first_gradient", index), _weakly(self, "_on_moved_gradient")
        return _core.make_grad_hook(self.engine, index, first, moved, _weakly(self, "_on_other_gradient"))

    def _on_replaced_parameter(self, index: int, param: torch.nn.Parameter) -> None:
        self._hooks.attach(index, param)
        self._second_round.note_replaced(index)

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
        if engine.mode != _core.Mode.REDUCE:
            return
        if (grad := local_grad(param)) is None:
            self._on_no_gradient(index, param)
            return
        is_last, view = self._hooks.comes_last(index), self.slots.fitting_view(index, grad)
        if not is_last and not engine.packed(index):
            engine.mark_used(index)  # what the hooks that follow make of it is taken at the end of backward
            return
        grad = self._means.note_own(index, grad)
        if view is not None and not engine.packed(index):
            view.copy_(grad)  # another layout in memory, or hooks of the program came before
            engine.mark_packed(index)
        elif view is not None and self.comm_hooks is not None:
            if not self.comm_hooks.add_late(index, grad):
                self.agreement.fault = RuntimeError(
                    f"parameter '{self.names[index]}' got a second gradient in one backward after the communication "
                    "hook had taken its first; from the next iteration on its bucket waits for the end of backward"
                )
        else:
            # A second gradient after packing, or one without a fitting slot: linear, so exact when added afterwards.
            self._completion.note_late(index)
            self._second_round.add(index, grad)
        param.grad = None

    def _on_no_gradient(self, index: int, param: torch.nn.Parameter) -> None:
        """The hook ran, and `.grad` is None."""
        if not self._hooks.are_others(index):
            # A node in the graph gave None: as with torch's class, that counts as zeros, or as no gradient.
            if not self._usage.allow_unused:
                self.engine.mark_used(index)
            return
        if param is not self.params[index]:
            raise RuntimeError(
                f"parameter '{self.names[index]}': a post-accumulate-grad hook of the program returned a value, which "
                "torch hands to the next hook in the parameter's place; such hooks have to return None"
            )
        raise RuntimeError(
            f"parameter '{self.names[index]}': a hook of the program took its gradient away before it was reduced. To "
            "step parameters inside backward, use torch's _apply_optimizer_in_backward or _register_fused_optim"
        )

    # ---- finish

    @torch.no_grad()
    def _on_backward_end(self) -> None:
        self.on_backward(self.engine.mode == _core.Mode.REDUCE)
        if self.engine.mode == _core.Mode.LOCAL:
            self._end_local()
            return
        try:
            if not self.agreement.joined:
                self._completion.complete_missing()
                self._check_accumulated()
            self._finish()
        except StepFailed as error:
            self._drop_gradients()
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
        self._give_warning()

    def _check_accumulated(self) -> None:
        """Whether what is reduced now is what the backwards of this iteration were to give; if not, it fails."""
        fault = self.agreement.weight.fault(self.names, self.engine)
        if self.loop.is_incomplete:
            fault = RuntimeError(
                "a backward under no_sync() raised in this iteration, so that what .grad holds is incomplete: call "
                "zero_grad() after such an error and begin the iteration again on every rank"
            )
        self.agreement.fault = self.agreement.fault or fault

    def _end_local(self) -> None:
        self.engine.disarm()
        self.loop.note_local_end()
        fault, self.agreement.fault = self.agreement.fault, None
        if fault is not None:
            raise fault

    def _finish(self) -> None:
        verdict = self.agreement.reduce()
        factor = self.agreement.factor_of(verdict)
        self.agreement.finish_hooks()
        if second := verdict.second_round():
            if not self.agreement.joined:
                self._second_round.add_kept(second, self.slots)
            self._second_round.run(second, self._means)
            self.slots.plan_for(second, self._means.sparse)
        self._means.scale(factor)
        first_of = None if self.comm_hooks is None else self._first_of_all_ranks  # hooks may give each something else
        self.finite.judge(verdict, self._means.of_used(verdict), self.transport.global_rank, first_of)
        self._usage.note(verdict)
        if not verdict.all_used or self._usage.static_graph:
            self._usage.check(verdict, self.slots.expected())
        if not self.agreement.joined:
            self._means.install(verdict, factor, self.comm)
            self.finite.note_installed(self.params)
        is_plain = self.comm_hooks is None and self._means.are_plain and not second and factor == 1.0
        self.norm.note(is_plain and not self.agreement.joined)
        if not self.slots.is_final and self.slots.next_plan is None:
            self.slots.plan_ready_order(self.comm, verdict)

    def _first_of_all_ranks(self, parameter: int) -> int:
        """-1: none; collective."""
        found = [int(text) for text in self.comm.all_gather_bytes(str(parameter).encode())]
        return min((index for index in found if index >= 0), default=-1)

    def _give_warning(self) -> None:
        """What this backward gave cause for. The last thing it does: where warnings are errors, this raises."""
        text, self.agreement.warning = self.agreement.warning, None
        if text is not None:
            warnings.warn(text, stacklevel=3)

    def _on_backward_aborted(self, find_text: Callable[[], str]) -> None:
        """Backward raised on this rank: keep the peers company to the end of the iteration and tell them."""
        if self.engine.mode != _core.Mode.REDUCE:
            self.engine.disarm()
            self.agreement.fault = None
            self.loop.is_incomplete = True
            return
        try:
            self.raise_failure()
            self._completion.complete_with_zeros()
            self._drop_gradients()
            self.agreement.reduce(failed=True)
            try:
                text = find_text()
            except Exception:  # peers wait for what follows
                text = ""
            self.agreement.share_failure(text)
        except BaseException as error:  # nobody to raise to: it is raised by whatever comes next
            self._break(error)
            if isinstance(error, KeyboardInterrupt):
                _thread.interrupt_main()  # this one must not be lost
        finally:
            self._reset()

    def _drop_gradients(self) -> None:
        """Of an iteration that failed. What was packed is gone; the rest is this rank's alone, to be neither applied
        nor added to by the iteration that follows."""
        for param in self.params:
            param.grad = None

    def _reset(self) -> None:
        self.engine.disarm()
        self._second_round.clear()
        self._means.clear()
        self.agreement.clear()
        self.loop.clear()

    # ---- failure, end

    def _break(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            # A process group may still have an operation on the buckets under way, and no way to call it back.
            if isinstance(self.transport, Transport) or self.comm_hooks is not None:
                _abandoned.extend(self.slots.memories)
            for transport in self._transports:
                with contextlib.suppress(Exception):  # of a transport in Python: the failure that led here counts
                    transport.abort(text_of(error))

    def raise_failure(self) -> None:
        """Raises CommError if communication broke down in an earlier iteration."""
        if (failure := self.failure) is not None:
            raise CommError(f"communication broke down earlier, this wrapper is dead: {text_of(failure)}") from failure

    @property
    def failure(self) -> BaseException | None:
        """What broke communication for good; on a GPU also what was noticed since the host went on."""
        if self._failure is None and self._gpus is not None:
            try:
                self._gpus.transport.check_failure()
            except CommError as error:
                self._break(error)
        return self._failure

    def keep_company(self) -> None:
        """One iteration of a rank that has joined: reduces zeros with its peers.

        `.grad` stays what it is; where that is a view of a bucket, it has the peers' mean afterwards.
        """
        self.raise_failure()
        self._ready_slots()
        self.engine.arm()
        self._completion.complete_with_zeros()
        self.agreement.joined = True
        try:
            self._on_backward_end()
        finally:
            self.agreement.joined = False  # also where that raised, and the program leaves the context

    def add_comm_hook(self, state: object, hook: Hook, caps: Sequence[int], group: dist.ProcessGroup) -> None:
        """Has buckets reduced by the hook; a further one gets what those before made of them. Collective, between
        iterations. caps: of the buckets that hooks get."""
        if self.comm_hooks is None:
            notes = HookNotes(group)
            hooks = CommHooks(self.slots, self.params, self.engine, notes, self._timeout_s)
            self.agreement.comm_hooks = hooks
            self.engine.hand_over_to(hooks.take)
            self.slots.plan_without_gaps(caps)
        else:
            hooks = self.comm_hooks
        hooks.add(state, hook)

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
        self._let_go()
        retire(self)
        self.comm.close()

    def __del__(self) -> None:
        if hasattr(self, "_hooks"):  # construction may have failed before
            self._let_go()

    def _let_go(self) -> None:
        self._hooks.detach()
        _core.forget_grads(self.engine)


# Memory that outlives its wrapper, because something may still be written to it.
_abandoned: list[BucketMemory] = []


def _weakly(owner: Reducer, method: str, *first: object) -> Callable:
    """The bound method without keeping its owner alive; does nothing once it is gone. first: its first arguments."""
    reference = weakref.ref(owner)

    def call(*args: object) -> None:
        target = reference()
        if target is not None:
            getattr(target, method)(*first, *args)

    return call
