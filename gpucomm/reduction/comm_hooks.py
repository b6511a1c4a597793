"""Communication hooks of torch's signature: what reduces a bucket in place of the transport."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from gpucomm import _core
from gpucomm.errors import CommTimeout, text_of
from gpucomm.reduction.layout.slots import Slots

Hook = Callable[[Any, Any], torch.futures.Future]

# Known to issue all of their collectives when they are called, none from a callback.
_ONE_STAGE: set[Hook] = {default_hooks.allreduce_hook, default_hooks.fp16_compress_hook}
_ONE_STAGE |= {default_hooks.bf16_compress_hook, debugging_hooks.noop_hook}

_POLL_S = 0.0002
_LOOK_AT_PEERS_S = 0.2


class GradBucket:
    """A packed bucket as a communication hook sees it: torch's GradBucket, which Python cannot construct.

    The gradients in it are this rank's, undivided. The tensors belong to the wrapper; they are valid until the hook's
    future is complete.
    """

    def __init__(self, index: int, flat: torch.Tensor, params: list, gradients: list, is_last: bool) -> None:
        self._index = index
        self._flat = flat
        self._params = params
        self._gradients = gradients
        self._is_last = is_last
        self._buffer = flat

    def index(self) -> int:
        """In the order in which buckets are reduced, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket as one flat tensor, without gaps."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Puts another tensor in the place of buffer(); the gradients keep lying in the first one."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """One for each parameter, shaped like it: views of the bucket."""
        return list(self._gradients)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self._params)

    def is_last(self) -> bool:
        """Whether this is the iteration's last bucket."""
        return self._is_last

    def take(self, result: torch.Tensor) -> None:
        """Makes what a hook's future holds the content of the bucket. Raises ValueError if it has another size."""
        flat = self._flat
        if flat.is_complex() and not result.is_complex():
            flat = torch.view_as_real(flat)  # what torch's collectives make of complex tensors
        if result.numel() != flat.numel():
            raise ValueError(
                f"the communication hook returned {result.numel()} elements for bucket {self._index}, which has "
                f"{flat.numel()}"
            )
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.detach().reshape(flat.shape))
        self._buffer = self._flat


def bucket_of(slots: Slots, params: list[torch.nn.Parameter], index: int, flat: torch.Tensor) -> GradBucket:
    """A bucket of the plan in force, its gradients being views of `flat`. params: one for each index."""
    members = slots.plan.buckets[index].slots
    grads = [slots.specs[slot.parameter].view(flat.untyped_storage(), slot.offset) for slot in members]
    if grads[0].is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    last = max(i for i, bucket in enumerate(slots.plan.buckets) if bucket.numel > 0)
    return GradBucket(index, flat, [params[slot.parameter] for slot in members], grads, index == last)


class CommHooks:
    """The hooks of one wrapper and their buckets in flight. The first hook gets a bucket's gradients when all are
    packed; each further one, after backward, what the one before made of them.

    A hook may issue collectives from its future's callbacks, in an order that differs between ranks while another
    bucket's are issued. So, but for hooks that are known not to, a bucket's hook is called when the future of the
    bucket before is complete.
    """

    def __init__(
        self, slots: Slots, params: list[torch.nn.Parameter], engine: _core.Engine, notes: "HookNotes", timeout_s: float
    ) -> None:
        self.raised = False  # a hook raised in this iteration, here or on a peer
        self._notes = notes
        self._slots = slots
        self._params = params
        self._engine = engine
        self._timeout_s = timeout_s
        self._hooks: list[tuple[Hook, object]] = []
        self._in_flight: list[tuple[GradBucket, torch.futures.Future]] = []
        self._late: set[int] = set()  # parameters that once got a second gradient in one backward
        self._learning = True

    def add(self, state: object, hook: Hook) -> None:
        self._hooks.append((hook, state))

    # ---- the plan

    def hold_back(self) -> None:
        """When an iteration is armed. In the first one every bucket waits for the end of backward, afterwards those in
        which a parameter got a second gradient."""
        for index, bucket in enumerate(self._slots.plan.buckets):
            late = bool(self._late) and any(slot.parameter in self._late for slot in bucket.slots)
            self._engine.hold_back(index, self._slots.held or self._learning or late)

    def add_late(self, parameter: int, grad: torch.Tensor) -> bool:
        """A second gradient for a packed slot: added to it, unless its hook was called already: then False."""
        self._late.add(parameter)
        bucket = self._slots.bucket_of(parameter)
        if bucket < self._engine.launched:
            return False
        self._slots.view(parameter).add_(grad)
        self._engine.hold_back(bucket)
        return True

    # ---- one iteration

    def take(self, index: int, must: bool) -> bool:
        """Calls the first hook for a bucket, unless it had to wait for the one before: then False, if not `must`."""
        if self.raised:
            return True  # the iteration has failed
        hook, state = self._hooks[0]
        if self._in_flight and hook not in _ONE_STAGE and not (before := self._in_flight[-1][1]).done():
            if not must:
                return False
            self._wait(before)
        self._in_flight.append(
            self._call(hook, state, bucket_of(self._slots, self._params, index, self._slots.memories[index].flat))
        )
        return True

    def finish(self) -> None:
        """Waits for the hooks, runs the further ones, and puts the results in the buckets."""
        for number in range(len(self._hooks)):
            if number > 0:
                buckets = [bucket for bucket, _ in self._in_flight]
                self._in_flight = []
                for bucket in buckets:
                    self._in_flight.append(self._call(*self._hooks[number], bucket))
                    self._wait(self._in_flight[-1][1])
            for bucket, future in self._in_flight:
                self._wait(future)
                bucket.take(_tensor_of(future, self._hooks[number][0]))
        for bucket, _ in self._in_flight:
            self._engine.mark_reduced(bucket.index())
        self._learning = False

    def drain(self) -> None:
        """Waits until nothing is in flight, whatever becomes of it."""
        for _, future in self._in_flight:
            self._wait(future)

    def reset(self) -> None:
        """At the end of an iteration."""
        self._in_flight = []
        self.raised = False

    def run(self, bucket: GradBucket) -> torch.futures.Future:
        """The first hook's future for any bucket."""
        hook, state = self._hooks[0]
        return self._call(hook, state, bucket)[1]

    # ----

    def _raise_if_peer_raised(self) -> None:
        if (text := self._notes.read(self._engine.iteration)) is not None:
            self.raised = True
            raise PeerHookRaised(text)

    def _call(self, hook: Hook, state: object, bucket: GradBucket) -> tuple[GradBucket, torch.futures.Future]:
        try:
            future = hook(state, bucket)
            if not isinstance(future, torch._C.Future):
                raise TypeError(f"communication hook {name_of(hook)} returned {type(future)}, accepted is a Future")
        except BaseException as error:
            self.raised = True
            self._notes.write(self._engine.iteration, f"{text_of(error)} (bucket {bucket.index()})")
            raise
        return bucket, future

    def _wait(self, future: torch.futures.Future) -> None:
        """Raises PeerHookRaised if a peer's hook raised, so that the future may never complete."""
        deadline = time.monotonic() + self._timeout_s
        look = time.monotonic() + _LOOK_AT_PEERS_S
        while not future.done():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now > look:
                self._raise_if_peer_raised()
                look = now + _LOOK_AT_PEERS_S
            if now > deadline:
                raise CommTimeout(f"a communication hook's future did not complete in {self._timeout_s:g} s", [])


def _tensor_of(future: torch.futures.Future, hook: Hook) -> torch.Tensor:
    value = future.value()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]  # as a collective's own future has it
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the future of communication hook {name_of(hook)} holds {type(value)}, accepted is a tensor")
    return value


def name_of(hook: object) -> str:
    return getattr(hook, "__qualname__", repr(hook))


def collectives_issued() -> dict[str, int]:
    """How many collectives each process group of this process has issued, by the group's name."""
    issued: dict[str, int] = {}
    for group in distributed_c10d._world.pg_map:
        try:
            issued[group.group_name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:
            continue  # a backend that does not count
    return issued


def first_uneven_group(issued: Sequence[dict[str, int]]) -> str | None:
    """The name of a group of which ranks have issued different numbers of collectives."""
    for group in sorted(set().union(*issued)):
        if len({counts[group] for counts in issued if group in counts}) > 1:
            return group
    return None


class PeerHookRaised(Exception):
    """A peer's hook raised in this iteration; the message says whose and what. Not for users."""


class HookNotes:
    """Notes through the group's store that a hook raised: peers that wait for a future cannot know otherwise.

    Construction is collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = distributed_c10d._get_process_group_store(group)
        self._rank = dist.get_rank()
        number = _notes_of.get(group.group_name, 0)
        _notes_of[group.group_name] = number + 1
        self._prefix = f"gpucomm/hook_raised/{group.group_name}/{number}"

    def write(self, iteration: int, text: str) -> None:
        with suppress(RuntimeError, dist.DistError):  # the store went: its group's collectives fail too
            self._store.set(f"{self._prefix}/{iteration}", f"rank {self._rank}: {text}")

    def read(self, iteration: int) -> str | None:
        with suppress(RuntimeError, dist.DistError):
            key = f"{self._prefix}/{iteration}"
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None


_notes_of: dict[str, int] = {}
