"""Where gradients lie: the bucket plan in force, the buckets' memory, and each parameter's view of its slot.

A new plan is made at the end of an iteration and comes into force when the next one is armed.
"""

import sys
from collections.abc import Collection, Container, Sequence

import torch

from gpucomm import _core, cuda
from gpucomm.communicator import Communicator
from gpucomm.reduction.layout.arena import Arena
from gpucomm.reduction.layout.buckets import (
    SLOT_ALIGNMENT,
    BucketMemory,
    BucketPlan,
    ParameterSpec,
)
from gpucomm.reduction.layout.grads import GRAD_REFERENCES
from gpucomm.reduction.layout.local import DistributedGrad, is_distributed
from gpucomm.reduction.layout.wire import Wire


class Slots:
    """The slots of one wrapper's parameters, kept in step with the engine's.

    params: a parameter for each index, the list of the table. caps: see BucketPlan.build. plan: a checked plan to use
    from the start and keep; else one in registration order, to be followed by one in ready order. wire: how gradients
    travel. sparse: indices of parameters whose gradients are expected to be sparse; a bucket has no slot for these.
    delayed: indices of those that are reduced together, after all others. skip_unused: the plan in ready order leaves
    out what nobody used; should it be used later, it goes in a second round and has a slot from then on. held: buckets
    wait for the end of backward.

    views: what of each parameter's gradient this rank holds, in its slot or unpacked beside it; None: no slot. grads:
    what is installed as `.grad`: the view, or a distributed tensor around it.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        engine: _core.Engine,
        arena: Arena,
        caps: Sequence[int],
        plan: BucketPlan | None,
        wire: Wire,
        sparse: Container[int] = (),
        delayed: Collection[int] = (),
        skip_unused: bool = False,
        held: bool = False,
    ) -> None:
        self.held = held
        self.is_final = plan is not None
        self._params = params
        self._engine = engine
        self._arena = arena
        self._caps = list(caps)
        self.wire = wire
        self._sparse = sparse
        self._alignment = SLOT_ALIGNMENT
        self.delayed = frozenset(delayed)
        self._skip_unused = skip_unused
        self.next_plan: BucketPlan | None = None
        self._next_specs: list[ParameterSpec] = []
        self.plan_next(plan or self._registration_order_plan())
        self.apply_next()
        self._arena.warm_up(self.memories)

    # ---- the plan in force

    def apply_next(self) -> bool:
        """Lets a plan that waits come into force; True if there was one."""
        plan, self.next_plan = self.next_plan, None
        if plan is None:
            return False
        self.plan, self.specs = plan, self._next_specs
        self.memories = [
            BucketMemory(bucket, memory, self.specs)
            for bucket, memory in zip(plan.buckets, self._arena.take(plan), strict=True)
        ]
        buckets = [
            (memory.memory, bucket.dtype, bucket.numel, [(s.parameter, s.offset, s.numel) for s in bucket.slots])
            for bucket, memory in zip(plan.buckets, self.memories, strict=True)
        ]
        self._engine.set_plan(buckets, plan.layout_hash)
        for index in range(len(buckets)):
            self._engine.hold_back(index, self.held)
        self.views: list[torch.Tensor | None] = [None] * len(self._params)
        self._layouts = _core.ViewLayouts()
        self._distributed: dict[int, DistributedGrad] = {}
        # One list for both, unless a parameter is distributed.
        self.grads = [*self.views] if any(map(is_distributed, self._params)) else self.views
        self._bucket_of = {slot.parameter: i for i, bucket in enumerate(plan.buckets) for slot in bucket.slots}
        for memory in self.memories:
            self._take_views(memory)
        self.slotless = [index for index, view in enumerate(self.views) if view is None]
        return True

    def warm_up(self) -> None:
        """After apply_next(): collective. Not where buckets wait for the end of backward: ranks may begin theirs at
        different points then, with collectives of the program between, before which nothing may be launched."""
        if not self.held:
            self._arena.warm_up(self.memories)

    def _take_views(self, memory: BucketMemory) -> None:
        for parameter in list(memory.views):
            # Nothing else may hold a view: references to it tell whether the program keeps the gradient.
            self.views[parameter] = memory.views.pop(parameter)
            self._layouts.note(parameter, self.views[parameter])
            if is_distributed(self._params[parameter]):
                grad = DistributedGrad(self._params[parameter], self.view(parameter))
                self._distributed[parameter] = grad
                self.grads[parameter] = grad.tensor
                grad.count_references()
            else:
                self.grads[parameter] = self.views[parameter]
        for parameter in memory.unpacked:
            self._engine.unpack_to(parameter, self.views[parameter])
        memory.count_uses()

    def bucket_of(self, index: int) -> int:
        """The bucket of a parameter that has a slot."""
        return self._bucket_of[index]

    def expected(self) -> list[int]:
        """Parameters in the plan that are to get a gradient in each iteration, unless told otherwise."""
        return [i for i in self.plan.parameters if self.specs[i].numel > 0 and i not in self.delayed]

    def view(self, index: int) -> torch.Tensor:
        """The view of a parameter that has a slot."""
        view = self.views[index]
        assert view is not None
        return view

    def fitting_view(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """The view, if there is one and it takes this gradient (of a distributed one, the local part)."""
        view = self.views[index]
        if view is None or grad.layout != torch.strided or grad.shape != view.shape:
            return None
        return view if self.wire.takes(grad.dtype, view.dtype) else None

    def substitute(self, index: int, grad: torch.Tensor) -> None:
        """Has this installed in place of what lies in a slot that does not fit; a new plan is on its way."""
        self._distributed.pop(index, None)
        self.grads[index] = grad

    def stale_buckets(self) -> set[int]:
        """Those in which somebody still keeps a gradient."""
        stale_views = _core.stale_views(self._engine, self._params, self.views, self._layouts, GRAD_REFERENCES)
        stale = {self._bucket_of[i] for i in stale_views}
        stale.update(i for i, memory in enumerate(self.memories) if memory.aliased())
        for parameter, grad in self._distributed.items():
            if grad.is_kept(self._params[parameter], GRAD_REFERENCES):
                stale.add(self._bucket_of[parameter])
        return stale

    def free(self) -> None:
        """Gives buckets new memory in which somebody still keeps a gradient, so that it is never overwritten."""
        for index in self.stale_buckets():
            bucket, old = self.plan.buckets[index], self.memories[index]
            fresh = self._arena.replace(bucket.nbytes) if old.in_slots else old.memory
            memory = BucketMemory(bucket, fresh, self.specs)
            if old.in_slots:
                self._engine.replace_memory(index, fresh)
            self._take_views(memory)
            self.memories[index] = memory

    # ---- the next one

    def plan_without_gaps(self, caps: Sequence[int]) -> None:
        """Starts again with a plan in registration order whose buckets have no padding between slots."""
        self._caps = list(caps)
        self._alignment = 1
        self.is_final = False
        self.plan_next(self._registration_order_plan())

    def plan_next(self, plan: BucketPlan | None) -> None:
        """Has the plan applied when the next iteration is armed, for what the parameters are now, not then."""
        self.next_plan = plan
        self._next_specs = self._specs_now()

    def plan_ready_order(self, comm: Communicator, verdict: _core.Verdict) -> None:
        """Plans in the order in which rank 0's gradients became ready, the rest last, for good; collective.

        verdict: of the iteration that just ended.
        """
        with cuda.gpu.host():
            order = torch.full((len(self._params),), -1, dtype=torch.int32)
            ready = self._engine.ready_order
            order[: len(ready)] = torch.tensor(ready, dtype=torch.int32)
            comm.broadcast(order)
            first = [i for i in order.tolist() if i >= 0]
        seen = set(first)
        rest = [i for i in self.plan.parameters if i not in seen]
        if self._skip_unused:
            rest = [i for i in rest if verdict.is_used(i)]
        plan = self._build(self._specs_now(), first + rest)
        self.plan_next(None if plan == self.plan else plan)
        self.is_final = True

    def plan_for(self, parameters: list[int], sparse: Container[int] = ()) -> None:
        """Plans slots for these parameters that fit what they are now, if they lack them; none for the sparse ones.

        What they are was compared in the second round, so every rank comes to the same plan.
        """
        specs = self._specs_now()
        order = [i for i in self.plan.parameters if i not in sparse]
        present = set(order)
        new = [i for i in parameters if i not in present and i not in sparse]
        fits = all(self.specs[i].is_like(specs[i]) for i in parameters if i in present)
        if fits and not new and len(order) == len(self.plan.parameters):
            self.plan_next(None)
        else:
            self.plan_next(self._build(specs, order + new))

    def _registration_order_plan(self) -> BucketPlan:
        trainable = [i for i, param in enumerate(self._params) if param.requires_grad and i not in self._sparse]
        return self._build(self._specs_now(), trainable[::-1])

    def _build(self, specs: list[ParameterSpec], order: list[int]) -> BucketPlan:
        punctual = [i for i in order if i not in self.delayed]
        delayed = [i for i in order if i in self.delayed]
        plan = BucketPlan.build(specs, punctual, self._caps, self._alignment)
        last = BucketPlan.build(specs, delayed, [sys.maxsize], self._alignment)
        return BucketPlan(plan.buckets + last.buckets)

    def _specs_now(self) -> list[ParameterSpec]:
        return [ParameterSpec.of(p, self.wire) for p in self._params]
