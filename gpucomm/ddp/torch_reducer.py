"""What `ddp.reducer` is with torch's class, for the programs that call its methods: those, in terms of our reduction.

Parameters are numbered as torch does it there: those that required a gradient at construction, in registration order.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpucomm.reduction.comm_hooks import GradBucket, bucket_of

if TYPE_CHECKING:
    from gpucomm.ddp.logging_data import Logger
    from gpucomm.ddp.wrapper import DistributedDataParallel


class TorchReducer:
    """The methods of torch.distributed.Reducer. Keeps no wrapper alive.

    indices: for each of torch's numbers of a parameter, its index in our reduction.
    """

    def __init__(self, ddp: "DistributedDataParallel", indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self._ddp = weakref.ref(ddp)
        self._reduction = ddp._reduction
        self._futures: list[torch.futures.Future] = []
        self._waits_at_end = False
        self._told_of_rebuilding = False

    # ---- around a forward and a backward

    def prepare_for_forward(self) -> None:
        """Raises what the iteration before left to say."""
        self._reduction.check_finished()

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """The backward that follows is reduced, whatever the wrapper's last forward asked for.

        outputs: not needed, parameters without a gradient are found when backward ends.
        """
        self._reduction.expect_reduction()

    def _autograd_hook(self, number: int) -> None:
        """Takes the gradient of this parameter as ready."""
        self._reduction.call_hook(self.indices[number])

    def _delay_all_reduce(self) -> None:
        """Nothing is delayed: gradients that are used in a static graph's first iteration are reduced as in others."""

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future]) -> None:
        """Waits for them when the next reduced backward ends, at the latest before the next forward."""
        if not self._waits_at_end:
            self._waits_at_end = True
            self._reduction.on_reduced.append(self._wait_at_end)
        self._futures.extend(futures)

    def _wait_at_end(self) -> None:
        self._waits_at_end = False
        self.wait_for_futures()

    def wait_for_futures(self) -> None:
        """Waits for what was installed. Raises what a future raises."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """work: an operation of torch's Join that runs beside the forward; ours needs none beside it."""
        work.wait()
        if not use_static_world_size:
            raise NotImplementedError("gradients are divided by the number of ranks that have inputs in join() only")

    # ---- buckets

    def _rebuild_buckets(self) -> bool:
        """True once: when asked for the first time after the order in which gradients become ready was learned."""
        told, self._told_of_rebuilding = self._told_of_rebuilding, self._reduction.slots.is_final
        return self._told_of_rebuilding and not told

    def _push_all_rebuilt_params(self) -> None:
        """Nothing to push: the order of the last iteration is the engine's own."""

    def _reset_state(self) -> None:
        """The plan is made anew from the order of the next iteration. Call it between iterations, on every rank."""
        self._told_of_rebuilding = False
        self._reduction.slots.is_final = False

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        if (ddp := self._ddp()) is not None:
            ddp._update_process_group(group)

    # ---- communication hooks

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future:
        """The communication hook's future for a bucket; the all-reduce's where there is none."""
        hooks = self._reduction.comm_hooks
        return self._run_allreduce_hook(bucket) if hooks is None else hooks.run(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future:
        """A future of the sum of a bucket's buffer over the ranks, which it becomes in place; undivided."""
        ddp = self._ddp()
        assert ddp is not None
        work = dist.all_reduce(bucket.buffer(), group=ddp.process_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """The buckets as communication hooks get them, with zeros of their own in place of the gradients."""
        slots, params = self._reduction.slots, self._reduction.params
        return [bucket_of(slots, params, i, torch.zeros_like(memory.flat)) for i, memory in enumerate(slots.memories)]

    # ---- settings

    def _set_optimizer_in_backward(self) -> None:
        """Nothing to set: the hook that runs such optimizers takes the gradients away by itself."""

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Which rows a sparse gradient has on any rank; not needed, ranks tell each other."""

    def _set_static_graph(self) -> None:
        if self._reduction.engine.iteration > 0:
            error = RuntimeError(
                "static_graph should be called before training loop starts and after DistributedDataParallel is "
                f"constructed, {self._reduction.engine.iteration} iterations were reduced already"
            )
            self._reduction.on_error(str(error))
            raise error
        self._reduction.set_static_graph()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        if (ddp := self._ddp()) is not None:
            ddp.logger.sample_rate = int(rate)

    def set_logger(self, logger: "Logger") -> None:
        """Errors of the reduction go to this logger."""
        self._reduction.on_error = logger.set_error_and_log

    def _remove_autograd_hooks(self) -> None:
        """Gradients stay local from now on."""
        self._reduction.detach_hooks()

    # ---- what happened

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if the last iteration was not reduced as it should have been."""
        self._reduction.check_finished()

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters were used in every iteration so far."""
        return self._reduction.graph_is_static

    def _get_local_used_map(self) -> torch.Tensor:
        """On how many ranks each parameter was used in the last iteration, int32; not collective."""
        counts = self._reduction.engine.used_counts()
        return torch.tensor([counts[index] for index in self.indices], dtype=torch.int32)

    def get_backward_stats(self) -> list[int]:
        """For each parameter: nanoseconds from the end of the last forward until its gradient was ready."""
        ddp = self._ddp()
        return [0] * len(self.indices) if ddp is None else ddp.logger.backward_stats()
