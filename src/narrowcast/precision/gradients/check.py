"""The gradient check: no inf or NaN gradient reaches a weight, without a wait for the device.

The total norm is also infinite if the square of a gradient is: Adam would put that infinity into
its second moment.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import TensorAddresses, upload
from narrowcast.precision.dtensor import as_sharded, local_part, local_shards


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


if TYPE_CHECKING:
    from narrowcast.kernels.grad_norm import NormKernel


@final
class GradientNorms:
    """Takes the norms of gradients, and joins those of shards over the devices they lie on."""

    def __init__(self, weights: Sequence[Tensor], *, kernel: bool) -> None:
        meshes = {w.device_mesh for w in map(as_sharded, weights) if w is not None}
        if len(meshes) > 1:
            raise UnsupportedError(
                "Sharded weights must be on one device mesh, got several. Shard them all over the "
                "same mesh."
            )
        self._mesh = meshes.pop() if meshes else None
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
        """Return the fp32 norm of each gradient, shards on other devices included."""
        take = gradient_norms if self._kernel is None else self._kernel
        norms = take(local_shards(gradients))
        if self._mesh is None:
            return norms
        for dim in range(self._mesh.ndim):
            shards = map(as_sharded, gradients)
            placed = [None if g is None else g.placements[dim] for g in shards]
            if any(one is not None and one.is_partial() for one in placed):
                raise UnsupportedError(
                    "A gradient is still a partial sum (Partial). Reduce it before step()."
                )
            sharded = torch.tensor([one is not None and one.is_shard() for one in placed])
            squares = norms.square()
            torch.distributed.all_reduce(squares, group=self._mesh.get_group(dim))
            norms = torch.where(upload(sharded, norms.device), squares.sqrt(), norms)
        return norms


def _kernel_on(device: torch.device) -> "NormKernel":
    from narrowcast.kernels.grad_norm import NormKernel  # needs Triton

    return NormKernel(device)
