"""The gradient check: no inf or NaN gradient reaches a weight, without a wait for the device.

The total norm is also infinite if the square of a gradient is: Adam would put that infinity into
its second moment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import TensorAddresses
from narrowcast.precision.dtensor import as_sharded, local_part, local_shards


@dataclass(frozen=True)
class Checked:
    """Result of one check of the gradients; tensors stay on the device."""

    norms: Tensor
    """One per parameter, of the gradients as they came (scaled). Of sharded ones, of the shard on
    this device, or inf if the shard of another rank is not finite."""
    norm: Tensor
    """Of all gradients together, the scale divided out."""
    finite: Tensor
    bad_rank: Tensor | None = None
    """The first rank whose loss is not finite, -1 for none; None without sharded weights."""
    mixed: Tensor | None = None
    """The first weight that has a gradient on some ranks only, -1 for none, likewise."""


@dataclass(frozen=True)
class Unscaled:
    """Result of the check when gradients were unscaled, before any edits."""

    checked: Checked
    present: Sequence[int]
    """The places of the weights that had one."""

    def and_then(self, edited: Checked, present: Sequence[int]) -> Checked:
        """Return what is true of the step: finite before and after, with the norm after."""
        norms, before = edited.norms, self.checked.norms
        if list(present) == list(self.present):
            # An edit may hide which gradients were bad, and the step says which.
            norms = torch.where(before.isfinite(), norms, before)
        finite = self.checked.finite & edited.finite
        return replace(edited, norms=norms, finite=finite, bad_rank=self.checked.bad_rank)


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the fp32 norm of each gradient; of a sharded one, of the shard on this device."""
    shards = local_shards(gradients)
    return torch.stack(torch._foreach_norm(list(shards), 2.0, dtype=torch.float32))


def check_norms(norms: Tensor, inv_scales: Tensor | None) -> Checked:
    """Combine the norms of all gradients; `inv_scales` is one factor for each, or one for all."""
    true_norms = norms if inv_scales is None else norms * inv_scales
    norm = torch.linalg.vector_norm(true_norms)
    # Of a single number torch takes the magnitude, whose square may still overflow.
    squares = norm.square() + norms.square().sum()
    # Squares are not negative; torch's isfinite is four launches, a comparison one.
    return Checked(norms=norms, norm=norm, finite=squares < math.inf)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return what `torch.nn.utils.clip_grad_norm_` multiplies gradients by."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def clip_and_unscale(
    checked: Checked, inv_scales: Tensor | None, *, clip_norm: float | None
) -> Tensor | None:
    """Return what gradients are multiplied by, one factor for all or one for each; None for one."""
    if clip_norm is None:
        return inv_scales
    clip = clip_factor(checked.norm, clip_norm)
    return clip if inv_scales is None else clip * inv_scales


if TYPE_CHECKING:
    from narrowcast.kernels.grad_norm import NormKernel


@final
class GradientNorms:
    """Takes the norms of gradients, in one kernel on a GPU."""

    def __init__(self, weights: Sequence[Tensor], *, kernel: bool) -> None:
        self._kernel = _kernel_on(local_part(weights[0]).device) if kernel else None

    def taken_places(self) -> TensorAddresses | None:
        """Return the addresses of the last call's gradients once; None without a kernel."""
        if self._kernel is None:
            return None
        places, self._kernel.places = self._kernel.places, None
        return places

    def has_replayed(self) -> None:
        """Take note that a CUDA graph has taken norms, of gradients of its own."""
        if self._kernel is not None:
            self._kernel.has_replayed()

    def make_room(self) -> None:
        """Have memory for the addresses that a CUDA graph is about to keep."""
        if self._kernel is not None:
            self._kernel.make_room()

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the fp32 norm of each gradient; of a sharded one, of the shard on this device."""
        if self._kernel is None:
            return gradient_norms(gradients)
        return self._kernel(local_shards(gradients))


def check_reduced(gradients: Sequence[Tensor]) -> None:
    """Raise if a gradient of sharded weights is not added up over the ranks yet."""
    for sharded in map(as_sharded, gradients):
        if sharded is not None and any(each.is_partial() for each in sharded.placements):
            raise UnsupportedError(
                "A gradient is still a partial sum (Partial). Reduce it before step()."
            )


def _kernel_on(device: torch.device) -> "NormKernel":
    from narrowcast.kernels.grad_norm import NormKernel  # needs Triton

    return NormKernel(device)
