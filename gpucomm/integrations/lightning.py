"""Lightning's DDP strategies over our DistributedDataParallel.

    trainer = lightning.Trainer(strategy=gpucomm.integrations.lightning.DDPStrategy(), devices=2, accelerator="cpu")
    fabric = lightning.Fabric(strategy=gpucomm.integrations.lightning.FabricDDPStrategy(), devices=2, accelerator="cpu")

Each takes what Lightning's own takes; further arguments go to our DistributedDataParallel (transport=, plan=). For the
package pytorch_lightning call gpucomm.install() in place of this.
"""

from typing import Any

import lightning.fabric.strategies
import lightning.pytorch.strategies
from torch.nn import Module

from gpucomm.ddp import DistributedDataParallel


class DDPStrategy(lightning.pytorch.strategies.DDPStrategy):
    """For lightning.Trainer: automatic and manual optimisation."""

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class FabricDDPStrategy(lightning.fabric.strategies.DDPStrategy):
    """For lightning.Fabric."""

    def setup_module(self, module: Module) -> Any:
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
