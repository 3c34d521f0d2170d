"""Picard: L-BFGS on rotations, preconditioned by a cheap Hessian; the fixed points are FastICA's.

Ablin, Cardoso, Gramfort, "Faster ICA under orthogonal constraint" (2018). It goes on where FastICA
jumps to and fro, since each step must lower the contrast.
"""

import torch
from torch import Tensor

from narrowcast.workloads.sft.ica.solvers.contrast import Contrast
from narrowcast.workloads.sft.ica.solvers.rotation import (
    Rotations,
    compute_sources,
    nearest_rotation,
)

MEMORY = 7
"""Steps that curvature is remembered of, as in the paper."""
SMALLEST_CURVATURE = 0.01
HALVINGS = 10
"""How often a step is halved before the plain direction is taken."""


def picard(
    white: Tensor, start: Tensor, contrast: Contrast, *, max_iter: int, tol: float
) -> Rotations:
    """Turn all components at once along directions in which the contrast falls."""
    now = start
    sign, gradient, curvature = _slopes(now, white, contrast)
    memory = _Memory()
    change = gradient.abs().amax((-1, -2))
    iterations = 0
    while iterations < max_iter and bool((change > tol).any()):
        iterations += 1
        going = change > tol
        direction = -memory.applied(gradient, curvature)
        # Uphill, or nowhere: what is remembered belongs to another place.
        lost = _inner(direction, gradient) >= 0
        direction = torch.where(lost[..., None, None], -gradient / curvature, direction)
        step, moved = _search(now, white, direction, sign, contrast)
        now = torch.where(going[..., None, None], moved, now)
        new_sign, new_gradient, curvature = _slopes(now, white, contrast)
        same = (new_sign == sign).all(-1) & ~lost
        memory.add(step[..., None, None] * direction, new_gradient - gradient, valid=same & going)
        sign, gradient = new_sign, new_gradient
        change = torch.where(going, gradient.abs().amax((-1, -2)), change)
    return Rotations(matrices=now, iterations=iterations, change=change, converged=change <= tol)


class _Memory:
    """The last steps and what they did to the gradient; for each item, those that count."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, step: Tensor, difference: Tensor, *, valid: Tensor) -> None:
        inner = _inner(step, difference)
        valid = valid & (inner > 0)
        # A pair that does not count has weight 0 and changes nothing below; nor do older ones.
        self._pairs = [(s, d, torch.where(valid, w, 0.0)) for s, d, w in self._pairs]
        weight = torch.where(valid, 1 / inner.masked_fill(~valid, 1.0), 0.0)
        self._pairs = [*self._pairs, (step, difference, weight)][-MEMORY:]

    def applied(self, gradient: Tensor, curvature: Tensor) -> Tensor:
        """Return the inverse Hessian times the gradient, by the usual two loops."""
        q, factors = gradient, []
        for step, difference, weight in reversed(self._pairs):
            factor = (weight * _inner(step, q))[..., None, None]
            q = q - factor * difference
            factors.append(factor)
        q = q / curvature
        for (step, difference, weight), factor in zip(self._pairs, reversed(factors), strict=True):
            q = q + (factor - (weight * _inner(difference, q))[..., None, None]) * step
        return (q - q.transpose(-1, -2)) / 2


def _slopes(now: Tensor, white: Tensor, contrast: Contrast) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sign of each source's contrast, the gradient, and the curvature of its pairs."""
    sources = compute_sources(now, white)
    slope, slope_of_slope = contrast.slopes(sources)
    cross = (slope @ sources.transpose(-1, -2) / sources.shape[-1]).to(now.device)
    kappa = slope_of_slope.to(now.device) - cross.diagonal(dim1=-2, dim2=-1)
    # Flat tails and heavy ones: a contrast falls towards one of the two, its negative to the other.
    sign = torch.where(kappa < 0, -1.0, 1.0).to(cross)
    cross, kappa = cross * sign[..., None], kappa.abs()
    gradient = (cross - cross.transpose(-1, -2)) / 2
    curvature = ((kappa[..., :, None] + kappa[..., None, :]) / 2).clamp(min=SMALLEST_CURVATURE)
    return sign, gradient, curvature


def _search(
    now: Tensor, white: Tensor, direction: Tensor, sign: Tensor, contrast: Contrast
) -> tuple[Tensor, Tensor]:
    """Return how far each item goes, and where it comes to: the first of 1, ½, ¼ … that is lower.

    Higher by what rounding does to the value is lower: near the end there is less than that left.
    """

    def value(rotation: Tensor) -> Tensor:
        values = contrast.value(compute_sources(rotation, white))
        return (sign * values.to(now.device)).sum(-1)

    before = value(now)
    limit = before + 4 * torch.finfo(before.dtype).eps * before.abs()
    chosen, best = torch.zeros_like(before), now
    step = torch.ones_like(before)
    for _ in range(HALVINGS):
        turned = torch.linalg.matrix_exp(step[..., None, None] * direction) @ now
        lower = (chosen == 0) & (value(turned) <= limit)
        chosen = torch.where(lower, step, chosen)
        best = torch.where(lower[..., None, None], turned, best)
        if bool((chosen > 0).all()):
            break
        step = step / 2
    return chosen, nearest_rotation(best)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-1, -2))
