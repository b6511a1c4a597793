"""What the ranks tell each other once an iteration, beside the gradients, and what follows for all of them alike."""

import json

from gpucomm import _core
from gpucomm.communicator import Communicator
from gpucomm.errors import CommError, CommTimeout, PeerFailed, StepFailed, text_of
from gpucomm.reduction.agreement.verdict import check_loops, differing_forwards, mean_factor
from gpucomm.reduction.agreement.weights import Weight
from gpucomm.reduction.comm_hooks import CommHooks, PeerHookRaised, collectives_issued, first_uneven_group
from gpucomm.reduction.layout.slots import Slots
from gpucomm.reduction.loop import Loop
from gpucomm.transport import Transport


class Agreement:
    """The exchange of headers on one wrapper's transport.

    fault: why the iteration fails on this rank, although its backward may come to its end.
    joined: this rank has no more data and keeps its peers company. peers_joined: others have none, as of the last
    forward. mean_of_active: such ranks do not count in the mean.
    """

    def __init__(
        self,
        engine: _core.Engine,
        slots: Slots,
        names: list[str],
        comm: Communicator,
        transport: _core.Transport,
        loop: Loop,
    ) -> None:
        self.fault: Exception | None = None
        self.joined = False
        self.peers_joined = False
        self.mean_of_active = False
        self.weight = Weight()
        self.comm_hooks: CommHooks | None = None
        self.warning: str | None = None  # to be given, once, when the iteration is complete
        self._warned = False
        self._engine = engine
        self._slots = slots
        self._names = names
        self._comm = comm
        self._name_of = transport.global_rank
        # Communication hooks may use the group that the transport uses: never both at a time.
        self._shares_group = isinstance(transport, Transport)
        self._loop = loop

    def clear(self) -> None:
        """At the end of an iteration."""
        self.fault = None
        self.weight.clear()
        if self.comm_hooks is not None:
            self.comm_hooks.reset()

    def check_graph(self) -> None:
        """The gradients that come have a graph: where their means cannot get one, the iteration fails, everywhere."""
        if self.comm_hooks is not None:
            self.fault = RuntimeError("backward(create_graph=True) beside a communication hook: it drops the graph")
        elif self.peers_joined:
            self.fault = RuntimeError("backward(create_graph=True) after a rank has joined: it would not answer")

    def reduce(self, failed: bool = False) -> _core.Verdict:
        """Launches what is left, exchanges the headers and waits for it. failed: backward raised on this rank.

        Of communication hooks, only those on the transport's own group are waited for; for others see finish_hooks.
        """
        if self.comm_hooks is not None:
            if self._shares_group and self.comm_hooks.raised:
                # Peers may be in a collective of its group, which nothing else may be paired with.
                raise CommError("a communication hook raised on this rank, between collectives of the group")
            try:
                self._engine.launch_rest()
                if self._shares_group:
                    self.comm_hooks.finish()
            except Exception as error:
                if self._shares_group:
                    raise CommError(f"a communication hook raised: {text_of(error)}") from error
                if not isinstance(error, PeerHookRaised):
                    self.fault = error
        return self._exchange_headers(failed or self.fault is not None)

    def finish_hooks(self) -> None:
        """Waits for the communication hooks that reduce() left running."""
        if self.comm_hooks is not None and not self._shares_group:
            self.comm_hooks.finish()

    def _exchange_headers(self, failed: bool) -> _core.Verdict:
        try:
            return self._engine.finish(
                backwards=self._loop.backwards,
                forwards=self._loop.forwards,
                failed=failed,
                joined=self.joined,
                weight=self.weight.total,
                nonfinite=self._engine.nonfinite_parameter,
            )
        except (CommTimeout, PeerFailed) as error:
            if (bucket := self._engine.reduced) == len(self._slots.plan.buckets):
                raise
            names = [self._names[slot.parameter] for slot in self._slots.plan.buckets[bucket].slots]
            text = f"{error} (gradients, iteration {self._engine.iteration}, bucket {bucket}: {', '.join(names)})"
            if isinstance(error, PeerFailed):
                raise PeerFailed(text, error.rank, error.reason) from error
            raise CommTimeout(text, error.missing, bucket, names) from error

    def factor_of(self, verdict: _core.Verdict) -> float:
        """By what the means in the buckets are to be multiplied. Raises, the same on every rank, StepFailed."""
        if verdict.agreed:
            return 1.0
        if any(words.failed for words in verdict.ranks):
            texts = self.share_failure("" if self.fault is None else text_of(self.fault))
            raised = [
                f"rank {self._name_of(r)}: {text or 'raised in backward'}"
                for r, (words, text) in enumerate(zip(verdict.ranks, texts, strict=True))
                if words.failed
            ]
            raise StepFailed(f"iteration {self._engine.iteration} failed on {'; '.join(raised)}") from self.fault
        check_loops(verdict, self._name_of)
        per_rank = differing_forwards(verdict, self._name_of)
        if per_rank is not None and not self._warned:
            self._warned = True
            self.warning = (
                f"training forwards since the last reduction differ between ranks: {per_rank}. Gradients are the mean "
                "of what each rank's backward gave, but a rank that left out a backward is behind the others from then "
                "on: check that every rank runs the same loop."
            )
        return mean_factor(verdict, self.mean_of_active, self._name_of)

    def share_failure(self, text: str) -> list[str]:
        """What each rank says of an iteration that failed; collective. Communication hooks in flight are waited for.

        Raises CommError if a hook raised on some ranks and not on others, with collectives that nobody answers.
        """
        hooks = self.comm_hooks if not self._shares_group else None
        mine = {"text": text, "issued": {} if hooks is None else collectives_issued()}
        everybody = [json.loads(words) for words in self._comm.all_gather_bytes(json.dumps(mine).encode())]
        texts = [words["text"] for words in everybody]
        if (group := first_uneven_group([words["issued"] for words in everybody])) is not None:
            raise CommError(
                f"a communication hook raised on some ranks only ({'; '.join(filter(None, texts))}) and left "
                f"collectives of process group {group} that are not answered: make the group and the wrapper anew"
            )
        if hooks is not None:
            hooks.drain()
        return texts
