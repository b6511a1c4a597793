"""The base of the optimizers: a torch.optim.Optimizer whose step is one pass in C++ (csrc/optim/step_plan.h).

A step: read where parameters, gradients and state lie -> prepare the state of those that have none -> run -> let go.
What a program did to groups, gradients or state since the last step is seen by `read`; nothing is written before all
of it was found to be in order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch

from gpucomm._core import optim as core
from gpucomm.optim import checks, gradients, state
from gpucomm.optim.state import Keys


class Rule(NamedTuple):
    """What a class computes, and the keys that a parameter's state may have beside `step` and `master`.

    required: those without which a state is another optimizer's.
    """

    method: str
    states: tuple[str, ...]
    required: tuple[str, ...]


class Numbers(NamedTuple):
    """What the kernels take of a group; names as in torch's groups, beta1 and beta2 SGD's momentum and dampening."""

    lr: float
    beta1: float
    beta2: float
    eps: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    amsgrad: bool = False
    nesterov: bool = False


class FusedOptimizer(torch.optim.Optimizer):
    """What the five optimizers share.

    Parameters: dense or not, on the CPU, float32, float64, float16 or bfloat16. States are float32 (float64 for
    float64 parameters) and belong to the optimizer. Options of every class, beside torch's own:

    master_weights: 16-bit parameters are the rounding of a float32 master that is stepped in their place; values that
        the program writes into them become the master's.
    stochastic_rounding: bfloat16 parameters without a master are rounded up or down at random, so that small updates
        are kept on average; the same on all ranks and however the work is shared out, by `rounding_seed`.
    zero_grad_in_step: gradients are zero after the step, at no pass of their own.
    """

    rule: ClassVar[Rule]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]):
        self._plan: core.OptimizerPlan | None = None
        self._plan_keys: list[Keys] = []
        self._loaded: dict[str, Any] | None = None
        # Whether anybody was given the state since the last step: see the note on trust in csrc/bindings/optim.cpp.
        self._touched = True
        checks.check_switches(type(self).__name__, defaults)
        self._check_group(defaults)
        super().__init__(params, defaults)

    # ---- what a class has to say

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError for options that are out of range; the group has all of them."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any]) -> Numbers:
        raise NotImplementedError

    def _keys(self, group: dict[str, Any]) -> Keys:
        raise NotImplementedError

    # ---- torch's surface

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """By parameter: the tensors that torch's optimizer of this name keeps, and `master`; see Keys."""
        self._touched = True
        return self.__dict__["state"]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._touched = True
        self.__dict__["state"] = state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler: as with torch, it leaves unscaling to the step where fused=True was given."""
        return bool(self.defaults.get("fused"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's. Raises RuntimeError for parameters that it cannot step, ValueError for one that is there twice."""
        if isinstance(param_group, dict):
            checks.check_switches(type(self).__name__, param_group)
            self._check_group({**self.defaults, **param_group})
            param_group = checks.checked_params(type(self).__name__, param_group)
        super().add_param_group(param_group)

    def step(  # type: ignore[override]  # torch's overloads
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Applies the gradients. closure: computes the loss anew, with gradients, and returns it.

        Blocks until done. Raises RuntimeError for a gradient that is sparse or of another dtype or device than its
        parameter; nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not found_inf.item():
            with torch.no_grad():
                self._apply_gradients()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's; takes what its optimizer of the same name, in any of its forms, and this one have saved.

        The state is copied, in float32 for 16-bit parameters. Raises ValueError for a state of another optimizer or
        model, and nothing was changed then.
        """
        handle = self.register_load_state_dict_pre_hook(lambda _, final: self._note_loaded(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loaded = None

    def __setstate__(self, state_of: dict[str, Any]) -> None:
        loaded = self.__dict__.get("_loaded")
        before = [{}] * len(state_of["param_groups"]) if loaded is None else self.param_groups
        super().__setstate__(state_of)
        self._plan, self._plan_keys, self._loaded, self._touched = None, [], None, True
        # What torch's groups do not have, and older versions' did not.
        for group, old in zip(self.param_groups, before, strict=True):
            for option, value in {**self.defaults, **old}.items():
                group.setdefault(option, value)
        if loaded is not None:
            state.adopt(self.state, self.rule.states, self.param_groups, loaded)

    # ---- how

    def _note_loaded(self, state_dict: dict[str, Any]) -> None:
        """The last of the hooks before loading: what is loaded, after the program's hooks have changed it."""
        state.check_loaded(type(self).__name__, self.rule.states, self.rule.required, self.param_groups, state_dict)
        self._loaded = state_dict

    def _apply_gradients(self) -> None:
        plan = self._current_plan()
        try:
            unready, odd = plan.read(self.__dict__, self._touched)
            self._touched = False
            stand_ins = gradients.plain_copies(type(self).__name__, self._params_of(odd))
            unready += [each.position for each in stand_ins if not plan.place(each.position, each.copy, each.grad)]
            if unready:
                state.prepare(self.__dict__["state"], plan, self._keys_of(unready))
            after = self._after_gradients()
            params = plan.params()
            torch.autograd.graph.increment_version(params if after == "kept" else params + plan.grads())
            plan.run(self._gradient_scale(), after, torch.get_num_threads())
            gradients.copy_back(stand_ins, after != "kept")
        finally:
            plan.release()

    def _current_plan(self) -> core.OptimizerPlan:
        """The plan for the groups as they are now, with their options of now."""
        groups = self.param_groups
        params = [group["params"] for group in groups]
        keys = [self._keys(group) for group in groups]
        plan = self._plan
        if plan is None or keys != self._plan_keys or not plan.holds(params):
            checks.check_distinct(groups)
            plan = core.OptimizerPlan(self.rule.method, params, state.first_indices(params), keys)
            self._plan, self._plan_keys = plan, keys
        for index, group in enumerate(groups):
            rounding = group["stochastic_rounding"], group["rounding_seed"]
            plan.set_group(index, *self._numbers(group), group["maximize"], *rounding)
        return plan

    def _params_of(self, indices: Iterable[int]) -> list[tuple[int, torch.Tensor]]:
        """Parameters by their indices among those of all groups."""
        if not indices:
            return []
        params = [param for group in self.param_groups for param in group["params"]]
        return [(index, params[index]) for index in indices]

    def _keys_of(self, indices: Iterable[int]) -> list[tuple[int, torch.Tensor, Keys]]:
        keys = [keys for group, keys in zip(self.param_groups, self._plan_keys, strict=True) for _ in group["params"]]
        return [(index, param, keys[index]) for index, param in self._params_of(sorted(indices))]

    def _gradient_scale(self) -> float:
        """What gradients are multiplied by: GradScaler sets `grad_scale`, by which they were multiplied."""
        grad_scale = getattr(self, "grad_scale", None)
        return 1.0 if grad_scale is None else 1.0 / float(grad_scale)

    def _after_gradients(self) -> str:
        if self.defaults["zero_grad_in_step"]:
            return "zeroed"
        # As torch's fused optimizers: after the step, gradients are what was applied.
        return "kept" if getattr(self, "grad_scale", None) is None else "scaled"
