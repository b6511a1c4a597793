"""gpucomm: a communication layer for data-parallel training in PyTorch."""

from gpucomm.buckets import BucketPlan
from gpucomm.communicator import Communicator
from gpucomm.ddp import DistributedDataParallel
from gpucomm.errors import (
    CollectiveMismatch,
    CommError,
    CommTimeout,
    InternalError,
    ModelsDiffer,
    PeerFailed,
    StepFailed,
    TransportUnavailable,
)
from gpucomm.trainer import CheckpointError, Trainer
from gpucomm.transport import Transport
from gpucomm.version import __version__

__all__ = [
    "BucketPlan",
    "CheckpointError",
    "CollectiveMismatch",
    "CommError",
    "CommTimeout",
    "Communicator",
    "DistributedDataParallel",
    "InternalError",
    "ModelsDiffer",
    "PeerFailed",
    "StepFailed",
    "Trainer",
    "Transport",
    "TransportUnavailable",
    "__version__",
]
