"""What a solver is given and what it returns: rotations of white signals, many at a time.

White signals are (…, components, rows), rotations (…, components, components); the dimensions
before are layers, restarts or whatever else is solved side by side, and need only broadcast. What
one of them comes to does not depend on the others: who has converged stands still. Rotations stay
on the CPU, wherever the signals are: a GPU takes longer for one of a few dozen rows than the way
there and back, and a second more to load what decomposes it.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Rotations:
    """Where the solver ended."""

    matrices: Tensor
    """(…, components, components), orthogonal: sources are matrices @ white."""
    iterations: int
    """Of the slowest."""
    change: Tensor
    """(…): how much the last iteration still moved."""
    converged: Tensor
    """(…), bool."""

    @property
    def finite(self) -> bool:
        """Whether nothing overflowed. Waits for the device."""
        # A gradient that is not finite moves nothing, and shows in the change alone.
        return bool(self.matrices.isfinite().all() & self.change.isfinite().all())


def random_rotations(
    shape: tuple[int, ...], components: int, *, generator: torch.Generator
) -> Tensor:
    """Return rotations to begin with, (*shape, components, components), in float64 on the CPU."""
    drawn = torch.randn((*shape, components, components), generator=generator, dtype=torch.float64)
    return nearest_rotation(drawn)


def compute_sources(rotation: Tensor, white: Tensor) -> Tensor:
    """Return the sources (…, components, rows), where the signals are."""
    return rotation.to(white.device) @ white


def nearest_rotation(matrix: Tensor) -> Tensor:
    """Return (M Mᵀ)^(-1/2) M; NaN where the matrix is not finite."""
    finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
    # torch refuses a whole batch for one item that is not finite.
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    u, _, v = torch.linalg.svd(torch.where(finite, matrix, eye))
    return torch.where(finite, u @ v, torch.nan)
