"""Our DistributedDataParallel in the place of torch's, under every name, for programs that are not to be edited.

Modules that are imported already hold torch's class under names of their own (`from torch.nn.parallel import
DistributedDataParallel as DDP`); those are replaced one by one. Whatever is imported later finds ours.
"""

import sys
import warnings
import weakref
from collections.abc import Iterator
from types import ModuleType

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gpucomm.ddp import DistributedDataParallel
from gpucomm.ddp.stand_in import StandIn

# Where install() has put ours, by the module's name and the attribute's.
_replaced: set[tuple[str, str]] = set()
_reported: weakref.WeakSet[type] = weakref.WeakSet()


def install() -> None:
    """Makes torch.nn.parallel.DistributedDataParallel ours, until uninstall().

    Every attribute of an imported module that holds torch's class holds ours from then on, in `__main__` too. It may be
    called again, for modules that came by torch's class otherwise. Not reached: names inside functions and classes, and
    containers. Classes derived from torch's class before stay what they are: a UserWarning names each.

    Ours is a subclass of torch's, so derived classes and `isinstance` work;
    `isinstance(x, torch.nn.parallel.DistributedDataParallel)` also holds for what was made of torch's class before.
    `gpucomm.DistributedDataParallel.__base__` is torch's.
    """
    for module, name in _names_of(TorchDDP):
        setattr(module, name, DistributedDataParallel)
        _replaced.add((module.__name__, name))
    StandIn.in_place = DistributedDataParallel
    for derived in _derived_from_torchs():
        if derived not in _reported:
            _reported.add(derived)
            warnings.warn(
                f"{derived.__module__}.{derived.__qualname__} was derived from torch's DistributedDataParallel before "
                "gpucomm.install(): it stays torch's. Install before it is imported.",
                stacklevel=2,
            )


def uninstall() -> None:
    """Puts torch's class back: wherever install() replaced it, and in torch's own modules.

    Other modules that were imported in between keep what they found: it cannot be told whether they asked for ours.
    """
    StandIn.in_place = None
    for module, name in _names_of(DistributedDataParallel):
        if (module.__name__, name) in _replaced or _is_under(module.__name__, "torch"):
            setattr(module, name, TorchDDP)
    _replaced.clear()


def _names_of(cls: type) -> Iterator[tuple[ModuleType, str]]:
    """The modules that hold a class, and under which name; gpucomm's own are left out."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or _is_under(module.__name__, "gpucomm"):
            continue
        # Their dictionaries: asking for the attributes would make lazy modules import everything.
        yield from [(module, name) for name, value in vars(module).items() if value is cls]


def _is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _derived_from_torchs() -> Iterator[type]:
    """The classes derived from torch's class and not from ours; of torch's own there is only a deprecated synonym."""
    found = list(TorchDDP.__subclasses__())
    for derived in found:
        if derived is not DistributedDataParallel:
            if derived.__module__ != "torch.nn.parallel":
                yield derived
            found.extend(derived.__subclasses__())
