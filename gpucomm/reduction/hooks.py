"""The gradient hooks of a wrapper's parameters: one for each index, on whatever object stands behind its name now."""

from collections.abc import Callable

import torch

from gpucomm import _core
from gpucomm.reduction.layout.parameters import ParameterTable
from gpucomm.reduction.layout.wire import Wire


class Hooks:
    """Makes a hook for each index and puts it on the parameter.

    make(index): the hook of an index; it stays the same object while parameters come and go.
    """

    def __init__(self, table: ParameterTable, make: Callable[[int], _core.GradHook]) -> None:
        self._table = table
        self._hooks = [make(index) for index in range(len(table.params))]
        self._handles: list[torch.utils.hooks.RemovableHandle | None] = [None] * len(self._hooks)
        self._attached_to = [0] * len(self._hooks)  # addresses of the tensors' insides, which swapping exchanges
        for index, param in enumerate(table.params):
            self.attach(index, param)

    def set_layouts(self, views: list[torch.Tensor | None], wire: Wire) -> None:
        """views: of a new plan, one per index; None: no slot."""
        for hook, view in zip(self._hooks, views, strict=True):
            if view is None:
                continue
            hook.set_layout(view)
            if wire.comes is not None and wire.takes(wire.comes, view.dtype):
                hook.accept(str(wire.comes).removeprefix("torch."))

    def attach(self, index: int, param: torch.nn.Parameter) -> None:
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

    def is_attached(self, index: int) -> bool:
        """Whether the hook of this index is on the object that the module has behind the name."""
        is_same = self._handles[index] is None or self._attached_to[index] == self._table.params[index]._cdata
        return is_same and self._table.is_in_place(index)

    def attach_all(self) -> None:
        """Conversions may replace (or swap the insides of) all parameters without telling: then no hook is left."""
        self._table.look_again()
        self._table.refresh()
        for index, param in enumerate(self._table.params):
            if not self.is_attached(index):
                self.attach(index, param)

    def comes_last(self, index: int) -> bool:
        """Whether the hook is the last one of its parameter; if not, it will be the next time.

        The program's own see the local gradient, as with stock DDP, also those that it registers after wrapping.
        """
        hooks, handle = self._table.params[index]._post_accumulate_grad_hooks, self._handles[index]
        if not hooks or handle is None or handle.id not in hooks or next(reversed(hooks)) == handle.id:
            return True
        hooks[handle.id] = hooks.pop(handle.id)  # autograd goes by the dict's own order, not the OrderedDict's
        return False

    def are_others(self, index: int) -> bool:
        """Whether the program has hooks of this kind on the parameter too."""
        return len(self._table.params[index]._post_accumulate_grad_hooks or ()) > 1

    def call(self, index: int) -> None:
        """What autograd would have done, had the hook been attached when the gradient was accumulated."""
        self._hooks[index](self._table.params[index])

    def detach(self) -> None:
        """Takes all hooks off. Idempotent."""
        for param, handle in zip(self._table.params, self._handles, strict=True):
            if handle is not None:
                # Not by the handle: its weak reference to the hooks may be gone when garbage is collected.
                (param._post_accumulate_grad_hooks or {}).pop(handle.id, None)
        self._handles = [None] * len(self._handles)
