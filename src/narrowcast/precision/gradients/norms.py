"""The norm of each gradient for the fused optimizer, by a kernel where there is one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.tables import TensorAddresses, upload
from narrowcast.precision.dtensor import as_sharded, local_part, local_shards
from narrowcast.precision.gradients.check import gradient_norms

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
        """Hand over where the gradients of the last call are; nothing is known of them afterwards.

        None where no kernel has looked. Whoever asks must do so before anybody can move them.
        """
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
