"""Dynamic mode decomposition: weights that move by a linear law, seen through few directions.

It is made on movements, not on weights: those of x' = A x + b follow A alone, wherever the fixed
point is. All that is computed is small (Gram matrices of the movements), so a prediction is again a
sum of movements. Tu et al. (2014); Dogra & Redman (2020) for weights.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.predictor import intervals, require

FAINTEST = 1e-6
"""Singular values below this share of the largest are rounding: fp32 movements have seven digits,
and a Gram matrix in fp64 shows eight."""
CHUNK = 2**22
"""Elements of a tensor that are widened to fp64 at once: 32 MiB a movement."""
MOST_CONDITION = 1e6
"""Of the eigenvectors; beyond it (repeated eigenvalues) the rank is lowered by one."""


@final
class Modes:
    """DMD of so many directions at most, with eigenvalues brought into the unit circle.

    Exact for a linear system of no more dimensions than `rank` that does not grow. Waits for the
    device once, for a matrix of (movements, movements).
    """

    learns, cost = False, 5.0  # inner products in fp64; measured on a CPU
    name = "dmd"

    def __init__(self, rank: int = 4) -> None:
        self._rank = rank
        self.needs = 3

    @torch.no_grad()
    def predict(self, history: WeightHistory, *, ahead_steps: int) -> list[Tensor]:
        """Return the movement that the linear law of the past goes on with."""
        require(self, history, ahead_steps=ahead_steps)
        gram = gram_of(history).cpu()
        coefficients = continued(gram, rank=self._rank, ahead=intervals(history, ahead_steps))
        return history.combine(coefficients)

    def observe(self, history: WeightHistory) -> None:
        """Learn nothing: all there is to know is in the history."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


def gram_of(history: WeightHistory) -> Tensor:
    """Return the inner products of all movements with one another, in fp64, on the device.

    For a moment all movements of one weight tensor exist in fp32.
    """
    moves = len(history) - 1
    total = torch.zeros(moves, moves, dtype=torch.float64, device=history.device)
    for i in range(len(history.shapes)):
        for some in history.moves_of(i).split(CHUNK, dim=1):
            wide = some.double()
            total += wide @ wide.mT
    return total


def continued(gram: Tensor, *, rank: int, ahead: float) -> list[float]:
    """Return what to multiply movements by so that they sum to the way to come.

    `gram` has the inner products of movements d₀ … dₙ₋₁; it is on the host.
    """
    moves = gram.shape[0]
    squares, vectors = torch.linalg.eigh(gram[:-1, :-1])
    largest = float(squares[-1])
    kept = int((squares > largest * FAINTEST**2).sum()) if largest > 0 else 0
    for dimensions in range(min(rank, kept), 0, -1):
        values = squares[-dimensions:].sqrt()
        basis = vectors[:, -dimensions:] / values  # U = D₁ · basis is orthonormal
        law = basis.mT @ gram[:-1, 1:] @ basis
        eigenvalues, eigenvectors = torch.linalg.eig(law)
        if float(torch.linalg.cond(eigenvectors)) > MOST_CONDITION:
            continue
        last = (basis.mT @ gram[:-1, -1]).to(eigenvectors.dtype)
        in_modes = torch.linalg.solve(eigenvectors, last)
        way = (eigenvectors @ (_further(eigenvalues, ahead) * in_modes)).real
        return [*(float(c) for c in basis @ way), 0.0]
    return [0.0] * moves


def _further(eigenvalues: Tensor, ahead: float) -> Tensor:
    """Return λ + λ² + … over `ahead` intervals, also where that is no whole number."""
    clipped = eigenvalues / eigenvalues.abs().clamp(min=1)
    one = torch.ones_like(clipped)
    near = (clipped - one).abs() < 1e-9
    apart = torch.where(near, 2 * one, clipped)
    still = clipped.abs() == 0  # of which torch's complex power makes a NaN
    power = torch.where(still, one, clipped) ** ahead
    return torch.where(near, ahead * one, clipped * (power - 1) / (apart - 1))
