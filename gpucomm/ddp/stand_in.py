"""What our class needs to stand in the place of torch's (see gpucomm.install): dynamo's flag, and isinstance."""

from abc import ABCMeta
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP


class StandIn(ABCMeta):
    """The metaclass of our DistributedDataParallel.

    `_active_ddp_module` is that of torch's own class, whichever class it is asked of or set on: torch's code sets it on
    the class that it finds under the name, dynamo may have been imported when there was another.

    While our class is in the place of torch's, `isinstance(x, torch.nn.parallel.DistributedDataParallel)` asks ours,
    and is true for torch's too: what was made or derived before is still one.
    """

    in_place: "StandIn | None" = None  # our class, while it is in the place of torch's

    @property
    def _active_ddp_module(cls) -> Any:
        return TorchDDP._active_ddp_module

    @_active_ddp_module.setter
    def _active_ddp_module(cls, module: Any) -> None:
        TorchDDP._active_ddp_module = module

    # These look into the __mro__: asking torch's class would come back here, as an ABC asks all that derives from it.
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls is StandIn.in_place and TorchDDP in type(instance).__mro__)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (cls is StandIn.in_place and TorchDDP in subclass.__mro__)
