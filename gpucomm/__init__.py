"""gpucomm: a communication layer for data-parallel training in PyTorch."""

from importlib.util import find_spec

if find_spec("gpucomm._core") is None:
    raise ImportError(
        f"{__path__[0]} has no compiled extension: it is the source tree, not the installed package. Run Python from "
        "another folder, use .venv/bin/python after `make train`, or build it in place with `make dev`"
    )

from gpucomm import optim
from gpucomm.communicator import Communicator
from gpucomm.ddp import DistributedDataParallel
from gpucomm.errors import (
    CollectiveMismatch,
    CommError,
    CommTimeout,
    InternalError,
    ModelsDiffer,
    NonFinite,
    PeerFailed,
    ReplicasDiffer,
    StepFailed,
    TransportUnavailable,
)
from gpucomm.install import install, uninstall
from gpucomm.launch import launch
from gpucomm.nccl_options import NcclOptions
from gpucomm.reduction.layout.buckets import BucketPlan
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
    "NcclOptions",
    "NonFinite",
    "PeerFailed",
    "ReplicasDiffer",
    "StepFailed",
    "Trainer",
    "Transport",
    "TransportUnavailable",
    "__version__",
    "install",
    "launch",
    "optim",
    "uninstall",
]
