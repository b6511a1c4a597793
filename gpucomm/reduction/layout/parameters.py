"""The parameters of a wrapped module: an index for each from construction on, whatever object stands behind its name.

A program may put another Parameter in a parameter's place (assignment, `load_state_dict(assign=True)`, a new
submodule). Torch tells of each registration; the new object then takes over the index of the old.
"""

import weakref
from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_watched: "weakref.WeakSet[ParameterTable]" = weakref.WeakSet()


class ParameterTable:
    """Names and objects of a module's parameters, in registration order, each shared one once.

    ignored: names to leave out. on_replace(index, param) is called when an index gets another object.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
        self.names = [name for name, _ in named]
        self.params: list[nn.Parameter] = [param for _, param in named]
        self._module = module
        self.sparse = self._find_sparse()
        self.on_replace: Callable[[int, nn.Parameter], None] | None = None
        self._ignored = frozenset(ignored)
        self._changed = False
        self._frozen_newcomers: list[nn.Parameter] = []  # added after construction; no gradients to reduce
        self._place_of: dict[int, tuple[nn.Module, str]] = {}
        self._find_places()
        _watched.add(self)

    def _find_sparse(self) -> frozenset[int]:
        """Indices of the parameters that an embedding was made to give sparse gradients."""
        tables = (m for m in self._module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
        weights = {id(table.weight) for table in tables}
        return frozenset(index for index, param in enumerate(self.params) if id(param) in weights)

    def _find_places(self) -> None:
        """Under which modules and names each object is registered; modules are held, so that their ids stay theirs."""
        index_of = {id(param): index for index, param in enumerate(self.params)}
        self._modules = list(self._module.modules())
        self._module_ids = set(map(id, self._modules))
        self._places: dict[tuple[int, str], int] = {}
        for module in self._modules:
            for name, param in module._parameters.items():
                if (index := index_of.get(id(param))) is not None:
                    self._places[id(module), name] = index
                    self._place_of[index] = (module, name)

    def note_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """A parameter was registered somewhere: if in one of our places, it takes over at once.

        One with a new name below our module is judged by refresh(): it may be an old one that moved (pruning does so).
        """
        index = self._places.get((id(module), name))
        if index is not None and param is not self.params[index]:
            self._changed = True
            self._replace(index, param)
        elif index is None and id(module) in self._module_ids:
            self._changed = True

    def note_module(self, parent: nn.Module) -> None:
        """A submodule was registered somewhere: if below ours, its parameters are looked up by refresh()."""
        self._changed = self._changed or id(parent) in self._module_ids

    def is_in_place(self, index: int) -> bool:
        """False if another object was put behind the name past torch's registration, straight into `_parameters`."""
        module, name = self._place_of[index]
        # A TorchScript module has something like a dict, without get().
        found = module._parameters[name] if name in module._parameters else None  # noqa: SIM401
        return found is self.params[index] or not isinstance(found, nn.Parameter)  # functional_call's last for one call

    def indices_of(self, params: Iterable[nn.Parameter]) -> list[int]:
        """Of objects that are in the table now."""
        index_of = {id(param): index for index, param in enumerate(self.params)}
        return [index_of[id(param)] for param in params]

    def look_again(self) -> None:
        """Makes the next refresh() compare everything."""
        self._changed = True

    def refresh(self) -> None:
        """Brings names and objects together again if something changed; cheap if not.

        Raises RuntimeError for a trainable parameter that was not there at construction: it has no index on other
        ranks. A frozen one (a teacher, a metric's network) is none of ours until it is unfrozen.
        """
        if any(param.requires_grad for param in self._frozen_newcomers):
            self._changed = True
        if not self._changed:
            return
        if not all(isinstance(param, nn.Parameter) for param in self._module.parameters()):
            return  # functional_call put other tensors in the parameters' places, until it returns
        index_of = {name: index for index, name in enumerate(self.names)}
        ours = set(map(id, self.params))
        newcomers = []
        for name, param in self._module.named_parameters():
            if name in self._ignored:
                continue
            index = index_of.get(name)
            if index is not None and param is not self.params[index]:
                self._replace(index, param)
            elif index is None and id(param) not in ours and not param.requires_grad:
                newcomers.append(param)
            elif index is None and id(param) not in ours:
                raise RuntimeError(
                    f"parameter '{name}' was added to the module after it was wrapped, its gradient would not be "
                    "reduced: wrap the module again"
                )
        self._find_places()
        self._frozen_newcomers = newcomers
        self._changed = False

    def _replace(self, index: int, param: nn.Parameter) -> None:
        self.params[index] = param
        if self.on_replace is not None:
            self.on_replace(index, param)


def _on_parameter(module: nn.Module, name: str, param: torch.Tensor | None) -> None:
    if isinstance(param, nn.Parameter):
        for table in list(_watched):
            table.note_parameter(module, name, param)


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    for table in list(_watched):
        table.note_module(module)


torch_module.register_module_parameter_registration_hook(_on_parameter)
torch_module.register_module_module_registration_hook(_on_module)
