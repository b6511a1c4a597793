"""The engine of a wrapper's parameters, for the device on which they are."""

import torch

from gpucomm import _core, cuda
from gpucomm.gpus import Gpus


def make_engine(
    params: list[torch.nn.Parameter],
    transport: _core.Transport,
    stream: _core.Stream,
    trace: _core.Trace,
    piece_bytes: int,
    gpus: Gpus | None,
) -> _core.Engine:
    """On the CPU gradients are packed one by one; on a GPU bucket by bucket, on the stream that the program uses, and
    the headers go through `transport` all the same.

    params: the list that is kept up to date as parameters are replaced.
    """
    if gpus is None:
        return _core.Engine(transport, stream, trace, len(params), piece_bytes=piece_bytes)
    engine = _core.Engine(
        gpus.transport,
        gpus.stream,
        trace,
        len(params),
        codec=gpus.codec,
        control_transport=transport,
        control_stream=stream,
        current_stream=gpus.current_stream,
    )
    _core.release_grads(engine, params, cuda.gpu.record_stream)
    return engine
