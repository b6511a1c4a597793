"""The norm of all means together, for clipping: from whole buckets, not tensor by tensor.

Where every `.grad` is the mean that the last reduction left, the buckets hold all of them and zeros between: torch
takes the norm of each bucket, a handful of launches. On a GPU each bucket's squares can be summed up right after its
reduction, beside the rest of backward. That sum is the norm only as long as nobody has written to a gradient, which
nothing tells: GradScaler.unscale_, collectives and `.data` leave no trace. So the program has to say so.
"""

from collections.abc import Sequence

import torch

from gpucomm import _core, cuda
from gpucomm.gpus import Gpus
from gpucomm.reduction.layout.slots import Slots


class MeansNorm:
    """Of one wrapper's means."""

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
        self._versions: list[int] | None = None  # of the views, when the sum of squares was theirs

    def note(self, plain: bool) -> None:
        """An iteration was reduced. plain: its means were installed, and are the buckets as NCCL reduced these."""
        self._versions = self._versions_now() if self._measures and plain else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, untouched: bool) -> torch.Tensor | None:
        """As torch.nn.utils.clip_grad_norm_, of the parameters in the plan; None: some gradient lies elsewhere than in
        the buckets, nothing was done. untouched: the program promises that it wrote to none of them."""
        if norm_type <= 0 or self._engine.mode != _core.Mode.IDLE or not self._are_in_buckets():
            return None
        planned = self._slots.plan.parameters
        grads = [self._slots.view(i) for i in planned if self._params[i].grad is not None]
        total = self._measured(norm_type) if untouched and len(grads) == len(planned) else None
        if total is None:
            total = self._norm_of(self._flats() if len(grads) == len(planned) else grads, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped; pass "
                "error_if_nonfinite=False to scale them by it all the same"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if grads and (self._gpus is not None or not bool(factor == 1.0)):  # on a GPU the host does not wait to see
            # Not the buckets: a factor that is no number would stay in what lies between the gradients.
            torch._foreach_mul_(grads, factor)
            torch.autograd.graph.increment_version(grads)
            self._versions = None
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

    def _norm_of(self, tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """In fp32 at least: a sum in bfloat16 has two digits."""
        present = [tensor for tensor in tensors if tensor.numel() > 0]
        if not present:
            return torch.zeros((), device=self._params[0].device)
        norms = torch._foreach_norm(present, norm_type, dtype=self._widest())
        return torch.linalg.vector_norm(torch.stack(norms), norm_type)

    def _flats(self) -> list[torch.Tensor]:
        return [flat for memory in self._slots.memories for flat in memory.gradient_flats]

    def _widest(self) -> torch.dtype:
        return torch.float64 if any(flat.dtype == torch.float64 for flat in self._flats()) else torch.float32

    def _are_in_buckets(self) -> bool:
        """Whether each gradient that there is, is the view of its slot, of real numbers."""
        for index in self._slots.plan.parameters:
            grad = self._params[index].grad
            if grad is not None and (grad is not self._slots.views[index] or grad.is_complex()):
                return False
        return all(self._params[index].grad is None for index in self._slots.slotless)

    def _versions_now(self) -> list[int]:
        return [self._slots.view(index)._version for index in self._slots.plan.parameters]
