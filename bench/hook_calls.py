"""Post-accumulate hooks, called one after the other as autograd calls them, and nothing else of a backward."""

import time
from collections import deque
from collections.abc import Callable

import torch
from harness import Sampler
from torch import nn


def empty_hook() -> Callable[[torch.Tensor], None]:
    """A C function that takes the parameter, keeps nothing and returns None."""
    return deque(maxlen=0).append


class HookCalls:
    """calls: hooks, each with its parameter.

    Gradients are kept here too, so that a hook that takes one out of `.grad` does not free it: without the hook
    zero_grad would, and what that costs depends on malloc's past.
    """

    def __init__(self, calls: list[tuple[Callable[[torch.Tensor], None], nn.Parameter]]):
        self._calls = calls
        self._grads = [torch.ones_like(param) for _, param in calls]

    def prepare(self) -> None:
        for (_, param), grad in zip(self._calls, self._grads, strict=True):
            param.grad = grad

    def run(self) -> None:
        for hook, param in self._calls:
            hook(param)

    def check(self, _: int) -> int:
        return sum(param.grad is None for _, param in self._calls)

    def sampler(self, name: str) -> Sampler:
        return Sampler(name, self.prepare, self.run, self.check, clock=time.process_time_ns)


class OurHookCalls(HookCalls):
    """Ours, with the engine behind them: gradients are packed, taken out of `.grad` and reduced over one rank.

    The iteration begins before the hooks are called and ends after them, without the wrapper.
    """

    def __init__(self, module: nn.Module, transport: str):
        import gpucomm

        self._wrapper = gpucomm.DistributedDataParallel(module, transport=transport)
        self._engine, self._views = self._wrapper._reduction.engine, self._wrapper._reduction.slots.views
        backward = reversed(list(module.parameters()))
        super().__init__([(hook, param) for param in backward for hook in param._post_accumulate_grad_hooks.values()])

    def prepare(self) -> None:
        super().prepare()
        for view in self._views:
            view.zero_()
        self._engine.arm()

    def check(self, _: int) -> int:
        kept = sum(param.grad is not None for _, param in self._calls)
        missing = len(self._engine.missing())
        self._engine.finish(backwards=1, forwards=1, failed=False)
        self._engine.disarm()
        return kept + missing + sum(int((view != 1).sum()) for view in self._views)
