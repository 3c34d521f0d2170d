"""Samples of weights, of their gradients and of what an update changes: one row a weight."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowcast.health.statistics.sampling import SAMPLE, Offsets, spacing, take
from narrowcast.kernels.launch import unsupported_reason

if TYPE_CHECKING:
    from narrowcast.kernels.samples import SampleKernel

TAKEN = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What the kernel reads."""


@final
class WeightSamples:
    """The samples of some weights, taken around an update."""

    def __init__(
        self, weights: Sequence[nn.Parameter], offsets: Offsets, *, in_runs: Sequence[bool]
    ) -> None:
        """Take the weights and where to sample them: in runs of neighbours, or single values."""
        self._weights = list(weights)
        self._offsets = [offsets.runs if runs else offsets.single for runs in in_runs]
        device = offsets.single.device
        self.before, self.gradient, self.update = (
            torch.zeros(len(self._weights), SAMPLE, device=device) for _ in range(3)
        )
        self.by_role = {
            "weight": self.before,
            "grad_weight": self.gradient,
            "update": self.update,
        }
        self._kernel = _kernel(self._weights, self._offsets, offsets)

    @torch.no_grad()
    def take(self) -> None:
        """Take samples of weights and gradients; zeros of a gradient that is not there."""
        self._fill(self.before, self._weights)
        self._fill(self.gradient, [weight.grad for weight in self._weights])

    @torch.no_grad()
    def take_updates(self) -> None:
        """Take samples of what an update has changed in the weights as they are kept."""
        self._fill(self.update, self._weights)
        self.update -= self.before

    def _fill(self, rows: Tensor, tensors: Sequence[Tensor | None]) -> None:
        if self._kernel is not None and all(t is None or _is_plain(t) for t in tensors):
            self._kernel(tensors, rows)
            return
        for row, tensor, offsets in zip(rows, tensors, self._offsets, strict=True):
            if tensor is None:
                row.zero_()
            else:
                take(tensor, row, offsets)


def _kernel(
    weights: Sequence[nn.Parameter], taken_at: Sequence[Tensor], offsets: Offsets
) -> "SampleKernel | None":
    if not weights or unsupported_reason(offsets.single.device) or not all(map(_is_plain, weights)):
        return None
    from narrowcast.kernels.samples import SampleKernel

    runs = [SAMPLE // len(at) for at in taken_at]
    spacings = [spacing(w.numel(), run=run) for w, run in zip(weights, runs, strict=True)]
    return SampleKernel(spacings, single=offsets.single, runs=offsets.runs)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype in TAKEN and tensor.numel() > 0 and not is_traceable_wrapper_subclass(tensor)
    )
