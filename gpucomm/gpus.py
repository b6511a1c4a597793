"""The GPUs of a process group: libraries, kernels and a communicator of NCCL's, made by all ranks together."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gpucomm import _core, cuda, libraries
from gpucomm.errors import CommError, TransportUnavailable
from gpucomm.nccl_options import NcclOptions
from gpucomm.world import Exchange, Settings, World, kernel_cache_folder, shares_gpus


@dataclass(frozen=True)
class Gpus:
    """What one rank's GPU needs to take part. transport: NCCL, on `stream`; current_stream: the program's, a handle."""

    device: _core.GpuDevice
    stream: _core.CudaStream
    kernels: _core.CudaKernels
    transport: _core.NcclTransport
    current_stream: Callable[[], int]
    options: NcclOptions

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured of what the program does on its stream of the moment."""
        return self.stream.captures(self.current_stream())

    @cached_property
    def codec(self) -> _core.CudaCodec:
        """Of one wrapper's buckets."""
        return _core.CudaCodec(self.kernels, self.stream)


@dataclass(frozen=True)
class Shrinking:
    """What a smaller group comes from. gpus: of the larger one; excluded: its ranks that are not in the smaller one."""

    gpus: Gpus
    excluded: list[int]

    def is_possible(self) -> bool:
        """Whether NCCL can make the communicator from the larger one's, which has no work under way then."""
        if not self.gpus.transport.can_shrink:
            return False
        self.gpus.stream.synchronize()
        return self.gpus.transport.can_shrink


def connect(
    world: World,
    exchange: Exchange,
    ordinal: int,
    options: NcclOptions | None = None,
    shrinking: Shrinking | None = None,
) -> Gpus:
    """Collective over the group; blocks until all ranks have come. shrinking: if there is a larger group's.

    Raises TransportUnavailable on every rank if one of them has no driver, no NCCL, another version of it than the
    others, other options, or a GPU that another rank has too; CommTimeout, CommError from NCCL's own initialisation.
    """
    options = options or NcclOptions()
    mine: dict[str, object] = {}
    parts = None
    try:
        settings = Settings.from_environment()
        device = _core.GpuDevice(ordinal, settings.cuda_library)
        nccl = _core.nccl_load(settings.nccl_library, libraries.nccl_wheel())
        kernels = _core.CudaKernels(device, libraries.nvrtc_wheels(), kernel_cache_folder())
        parts = device, _core.CudaStream(device), kernels
        mine = {"version": nccl["version_text"], "host": socket.gethostname(), "gpu": device.pci_bus_id}
        mine |= {"text": device.text, "shares": shares_gpus(), "options": options.facts()}
        mine["process"] = _core.process_identity()
        mine["shrinks"] = shrinking is not None and shrinking.is_possible()
        if world.rank == 0:
            mine["id"] = _core.nccl_unique_id().hex()
    except (CommError, ValueError) as error:
        mine = {"error": f"{type(error).__name__}: {error}"}
    everybody = [json.loads(text) for text in exchange(json.dumps(mine).encode())]
    _check(everybody, world.global_ranks)
    assert parts is not None
    device, stream, kernels = parts
    parent: dict[str, Any] = {}
    if shrinking is not None and all(facts["shrinks"] for facts in everybody):
        parent = {"parent": shrinking.gpus.transport, "excluded": shrinking.excluded}
    transport = _core.NcclTransport(
        device,
        kernels,
        world.rank,
        world.size,
        bytes.fromhex(everybody[0]["id"]),
        world.timeout_s,
        world.global_ranks,
        f"gpucomm {world.group.group_name}",
        options.config(),
        options.net_name or "",
        peers=_peers(everybody, world),
        **parent,
    )
    stream.watch(transport)
    return Gpus(device, stream, kernels, transport, cuda.gpu.current_stream(ordinal), options)


def _peers(everybody: list[dict], world: World) -> list[tuple[int, int, int]]:
    """The other ranks' processes that this one can watch: global rank, pid, start time."""
    machine, _, _ = everybody[world.rank]["process"]
    peers = zip(world.global_ranks, (facts["process"] for facts in everybody), strict=True)
    me = world.global_ranks[world.rank]
    return [(rank, pid, start) for rank, (where, pid, start) in peers if where == machine and rank != me]


def _check(everybody: list[dict], global_ranks: list[int]) -> None:
    """Raises TransportUnavailable for what would make NCCL fail, or hang, with less to say."""
    for rank, facts in zip(global_ranks, everybody, strict=True):
        if "error" in facts:
            raise TransportUnavailable(f"rank {rank} cannot use NCCL: {facts['error']}")
    first = everybody[0]
    for rank, facts in zip(global_ranks, everybody, strict=True):
        if facts["version"] != first["version"]:
            raise TransportUnavailable(
                f"NCCL is {first['version']} on rank {global_ranks[0]} and {facts['version']} on rank {rank}: install "
                "the same on all ranks"
            )
        if facts["options"] != first["options"]:
            raise TransportUnavailable(
                f"nccl_options differ: {first['options']} on rank {global_ranks[0]}, {facts['options']} on rank {rank}"
            )
    seen: dict[tuple[str, str], int] = {}
    for rank, facts in zip(global_ranks, everybody, strict=True):
        other = seen.setdefault((facts["host"], facts["gpu"]), rank)
        if other != rank and not facts["shares"]:
            raise TransportUnavailable(
                f"ranks {other} and {rank} both use {facts['text']} of {facts['host']}: does every rank call "
                "torch.cuda.set_device(LOCAL_RANK), and move its model there?"
            )


def device_of(params: list[torch.nn.Parameter]) -> int | None:
    """The ordinal of the GPU on which the parameters are; None if they are in host memory."""
    device = params[0].device
    return cuda.gpu.ordinal(device) if cuda.gpu.serves(device) else None
