"""The exceptions of gpucomm. User mistakes are ValueError and TypeError; everything between ranks is a CommError."""

from collections.abc import Sequence


class CommError(RuntimeError):
    """Something went wrong between ranks."""


class TransportUnavailable(CommError):
    """The transport asked for cannot serve this group; the message says which rank cannot and why."""


class CollectiveMismatch(CommError):
    """Ranks called different collectives at the same place; the message describes both. On every rank.

    What raised this is dead from then on.
    """


class ModelsDiffer(CommError):
    """The ranks wrapped different models; the message names the first difference. Raised on every rank."""


class ReplicasDiffer(CommError):
    """An audit found that the model's parameters or buffers are not the same on every rank. Raised on all of them.

    The message names the first tensor that differs, its first element that does, and both values. Nothing is changed.

    Attributes:
        parameter: the tensor's name, a parameter's or a buffer's.
        ranks: those that have not what most have, in the default process group; all where there is no majority.
    """

    def __init__(self, message: str, parameter: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.parameter, self.ranks)


class StepFailed(CommError):
    """A rank raised in this iteration, or the ranks' training loops diverged.

    Raised on every rank in the same iteration, before an optimizer applies it. Afterwards every `.grad` of the wrapper
    is None, on the rank that raised too. The next iteration works.
    """


class NonFinite(StepFailed):
    """A gradient is infinite or not a number, and the policy is to raise. On every rank; the next iteration works.

    Attributes:
        ranks: those whose own gradients are not finite, in the default process group; empty if only their sum is not.
        parameter: the first such parameter of the first of them.
        iteration: the number of the reduction, from 1.
    """

    def __init__(self, message: str, ranks: Sequence[int], parameter: str, iteration: int) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.parameter = parameter
        self.iteration = iteration

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.ranks, self.parameter, self.iteration)


class PeerFailed(CommError):
    """A peer is gone: it died, closed its communicator or gave up. What raised this is dead from then on.

    Attributes:
        rank: the peer's rank in the default process group.
        reason: what happened to it.
    """

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.rank, self.reason)


class CommTimeout(CommError):
    """Peers did not come within the timeout. What raised this is dead from then on.

    Attributes:
        missing: the ranks that did not come, in the default process group.
        bucket: index of the bucket that was waited for, None outside a gradient reduction.
        parameters: names of the parameters in that bucket.
    """

    def __init__(
        self, message: str, missing: Sequence[int], bucket: int | None = None, parameters: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing = list(missing)
        self.bucket = bucket
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.missing, self.bucket, self.parameters)


def text_of(error: BaseException) -> str:
    """Type and text of an exception; the type alone where its own text raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


_DEAD = "this communicator is dead since an earlier operation: "


def dead_since(failure: CommError) -> CommError:
    """What operations raise after one failed for good: the same type and attributes, with a text that says so."""
    text = str(failure)
    text = text if text.startswith(_DEAD) else _DEAD + text
    if isinstance(failure, PeerFailed):
        return PeerFailed(text, failure.rank, failure.reason)
    if isinstance(failure, CommTimeout):
        return CommTimeout(text, failure.missing, failure.bucket, failure.parameters)
    return type(failure)(text)


class InternalError(RuntimeError):
    """A fault of gpucomm itself. Please report it with the message."""
