"""The norm of all means together, for clipping: from whole buckets, not tensor by tensor.

Where every `.grad` is the mean that the last reduction left, the buckets hold all of them and zeros between. On a GPU
each bucket's squares are summed up right after its reduction, beside the rest of backward, from the first call on; that
sum is the norm as long as nobody has written to a gradient since (GradScaler.unscale_ does). Otherwise torch takes the
norm of each bucket, a handful of launches.
"""

import torch

from gpucomm import _core, cuda
from gpucomm.gpus import Gpus
from gpucomm.reduction.layout.slots import Slots


class MeansNorm:
    """Of one wrapper's means. codec: of a GPU's buckets, None on the CPU."""

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        slots: Slots,
        engine: _core.Engine,
        gpus: Gpus | None,
    ) -> None:
        self._params = params
        self._slots = slots
        self._engine = engine
        self._gpus = gpus
        self._squared = None if gpus is None else cuda.gpu.tensor_over(gpus.codec.squared_norm, torch.float32, 1)
        self._measures = False
        self._unused: frozenset[int] = frozenset()  # whose slots hold zeros, and whose `.grad` may be None
        self._versions: list[int] | None = None  # of the views, when the sum of squares was theirs

    def note(self, verdict: _core.Verdict, plain: bool) -> None:
        """The means of an iteration were installed. plain: they are the buckets as these were reduced."""
        planned = self._slots.plan.parameters
        self._unused = frozenset() if verdict.all_used else frozenset(i for i in planned if not verdict.is_used(i))
        self._versions = self._versions_now() if self._measures and plain else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor | None:
        """As torch.nn.utils.clip_grad_norm_, of the parameters in the plan; None: some gradient lies elsewhere than in
        the buckets, nothing was done."""
        if norm_type <= 0 or self._engine.mode != _core.Mode.IDLE or not self._are_all_in_buckets():
            return None
        flats = [flat for memory in self._slots.memories for flat in memory.gradient_flats if flat.numel() > 0]
        total = self._measured(norm_type)
        if total is None:
            total = self._norm_of(flats, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped; pass "
                "error_if_nonfinite=False to scale them by it all the same"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if self._gpus is not None or not bool(factor == 1.0):  # on a GPU the host does not wait to see
            for flat in flats:
                flat.mul_(factor)
            torch.autograd.graph.increment_version(self._views())
        return total

    def _measured(self, norm_type: float) -> torch.Tensor | None:
        """What was summed up beside backward, if it is what `.grad` holds; it is from the next iteration on."""
        if self._gpus is None or self._squared is None or norm_type != 2 or self._widest() == torch.float64:
            return None
        if not self._measures:
            self._measures = True
            self._engine.set_measure_norm(True)
        if self._versions is None or self._versions != self._versions_now():
            return None
        total = self._squared[0].sqrt()
        self._gpus.stream.follow(self._gpus.current_stream())  # the next iteration's sum begins after this was read
        return total

    def _norm_of(self, flats: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """In fp32 at least: a sum in bfloat16 has two digits."""
        dtype = self._widest()
        norms = [torch.linalg.vector_norm(flat, norm_type, dtype=dtype) for flat in flats]
        device = self._params[0].device
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)

    def _widest(self) -> torch.dtype:
        wide = any(memory.flat.dtype == torch.float64 for memory in self._slots.memories)
        return torch.float64 if wide else torch.float32

    def _are_all_in_buckets(self) -> bool:
        for index in self._slots.plan.parameters:
            grad = self._params[index].grad
            if grad is not self._slots.views[index] and not (grad is None and index in self._unused):
                return False
            if grad is not None and grad.is_complex():
                return False
        return all(self._params[index].grad is None for index in self._slots.slotless)

    def _views(self) -> list[torch.Tensor]:
        return [self._slots.view(index) for index in self._slots.plan.parameters]

    def _versions_now(self) -> list[int]:
        return [view._version for view in self._views()]
