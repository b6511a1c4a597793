"""DistributedDataParallel: torch's surface over our reduction."""

from gpucomm.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
