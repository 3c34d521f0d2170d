"""The guard: no non-finite gradient reaches a weight, on any path, without waiting for the device.

One pass over the gradients gives a norm per parameter. The total is finite exactly when every
gradient is finite and none is so large that its square is not: Adam would put that infinity into
its second moment. From the same norms come the clipping factor and, after a skip, the names of the
parameters whose gradients were bad.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Checked:
    """What one look at the gradients told; tensors stay on the device."""

    norms: Tensor
    """One per parameter, of the gradients as they came (scaled)."""
    norm: Tensor
    """Of all gradients together, the scale divided out."""
    finite: Tensor


@dataclass(frozen=True)
class Unscaled:
    """What was found in gradients when the scale was divided out, before anybody edited them."""

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
        return Checked(norms=norms, norm=edited.norm, finite=finite)


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the fp32 norm of each gradient."""
    return torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=torch.float32))


def check_gradients(
    gradients: Sequence[Tensor],
    inv_scales: Tensor | None,
    *,
    take_norms: Callable[[Sequence[Tensor]], Tensor] = gradient_norms,
) -> Checked:
    """Take the norms of all gradients; `inv_scales` is one factor for each, or one for all."""
    norms = take_norms(gradients)
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
