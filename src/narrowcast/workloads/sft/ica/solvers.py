"""ICA solvers: rotations (…, components, components) of white signals (…, components, rows).

Rotations stay on the CPU, which is faster for matrices this small. FastICA: Hyvärinen (1999).
Picard: Ablin, Cardoso, Gramfort, "Faster ICA under orthogonal constraint" (2018).
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

ContrastName: TypeAlias = Literal["logcosh", "cube", "exp"]
GAUSSIAN_LOGCOSH = 0.3745672075
"""Mean of log cosh over a standard normal distribution."""
MEMORY = 7
"""Pairs in the L-BFGS memory, as in the paper."""
SMALLEST_CURVATURE = 0.01
HALVINGS = 10
"""Halvings of a step before it is given up."""


class Rotations(NamedTuple):
    """Result of a solver."""

    matrices: Tensor
    """(…, components, components), orthogonal: sources are matrices @ white."""
    iterations: int
    change: Tensor
    """(…): last change."""
    tol: float

    @property
    def converged(self) -> Tensor:
        return self.change <= self.tol

    @property
    def finite(self) -> bool:
        """Whether nothing overflowed; synchronises."""
        # A nonfinite gradient moves nothing and shows only in the change.
        return bool(self.matrices.isfinite().all() & self.change.isfinite().all())


def random_rotations(
    shape: tuple[int, ...], components: int, *, generator: torch.Generator
) -> Tensor:
    """Return random rotations, (*shape, components, components), float64 on the CPU."""
    drawn = torch.randn((*shape, components, components), generator=generator, dtype=torch.float64)
    return nearest_rotation(drawn)


def compute_sources(rotation: Tensor, white: Tensor) -> Tensor:
    """Return the sources (…, components, rows), on the device of the signals."""
    return rotation.to(white.device) @ white


def nearest_rotation(matrix: Tensor) -> Tensor:
    """Return (M Mᵀ)^(-1/2) M; NaN where the matrix is not finite."""
    finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
    # torch raises for the whole batch if one item is not finite.
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    u, _, v = torch.linalg.svd(torch.where(finite, matrix, eye))
    return torch.where(finite, u @ v, torch.nan)


class Contrast(NamedTuple):
    """A negative log density G and its derivatives; sources are (…, components, rows)."""

    value: Callable[[Tensor], Tensor]
    """Returns the mean of G over rows, (…, components)."""
    slopes: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Returns g, (…, components, rows), and the mean of g′ over rows, (…, components)."""


def log_cosh(x: Tensor) -> Tensor:
    """Return log cosh x without overflow."""
    size = x.abs()
    return size + torch.log1p(torch.exp(-2 * size)) - math.log(2)


def negentropy(sources: Tensor) -> Tensor:
    """Return the distance of unit-variance sources from a normal distribution, (…, components)."""
    return (log_cosh(sources).mean(-1) - GAUSSIAN_LOGCOSH).square()


def _logcosh_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    slope = torch.tanh(x)
    return slope, 1 - slope.square().mean(-1)


def _exp_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    square = x.square()
    bell = torch.exp(-square / 2)
    return x * bell, ((1 - square) * bell).mean(-1)


def _cube_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    square = x.square()
    return x * square, 3 * square.mean(-1)


CONTRASTS: Mapping[ContrastName, Contrast] = {
    "logcosh": Contrast(value=lambda x: log_cosh(x).mean(-1), slopes=_logcosh_slopes),
    "exp": Contrast(value=lambda x: -torch.exp(-x.square() / 2).mean(-1), slopes=_exp_slopes),
    "cube": Contrast(value=lambda x: x.square().square().mean(-1) / 4, slopes=_cube_slopes),
}


def fastica_parallel(
    white: Tensor, start: Tensor, contrast: Contrast, *, max_iter: int, tol: float
) -> Rotations:
    """Update all components at once, orthogonalised after each iteration."""

    def step(now: Tensor) -> Tensor:
        return nearest_rotation(_newton(now, white, contrast))

    return _iterate(start, step, max_iter=max_iter, tol=tol)


def fastica_deflation(
    white: Tensor, start: Tensor, contrast: Contrast, *, max_iter: int, tol: float
) -> Rotations:
    """Find components one by one, each orthogonal to the previous ones."""
    matrices = start[..., :0, :]

    def step(now: Tensor) -> Tensor:
        return _orthogonalise(_newton(now, white, contrast), matrices)

    solved = []
    for row in start.split(1, -2):
        solved.append(_iterate(_orthogonalise(row, matrices), step, max_iter=max_iter, tol=tol))
        matrices = torch.cat([matrices, solved[-1].matrices], -2)
    change = torch.stack([each.change for each in solved]).amax(0)
    iterations = max(each.iterations for each in solved)
    return Rotations(matrices=matrices, iterations=iterations, change=change, tol=tol)


def _iterate(
    start: Tensor, step: Callable[[Tensor], Tensor], *, max_iter: int, tol: float
) -> Rotations:
    now, iterations = start, 0
    change = torch.full(start.shape[:-2], torch.inf, dtype=start.dtype, device=start.device)
    while iterations < max_iter and bool((change > tol).any()):
        iterations += 1
        moved = step(now)
        turned = ((moved * now).sum(-1).abs() - 1).abs().amax(-1)
        going = change > tol
        now = torch.where(going[..., None, None], moved, now)
        change = torch.where(going, turned, change)  # NaN is not above tol and stops
    return Rotations(matrices=now, iterations=iterations, change=change, tol=tol)


def _newton(rotation: Tensor, white: Tensor, contrast: Contrast) -> Tensor:
    slope, curvature = contrast.slopes(compute_sources(rotation, white))
    mean = (slope @ white.transpose(-1, -2) / white.shape[-1]).to(rotation.device)
    return mean - curvature[..., None].to(rotation.device) * rotation


def _orthogonalise(row: Tensor, matched: Tensor) -> Tensor:
    """Return a unit row orthogonal to the others."""
    rest = row - (row @ matched.transpose(-1, -2)) @ matched
    rest = rest - (rest @ matched.transpose(-1, -2)) @ matched  # again, because of rounding
    length: Tensor = rest.norm(dim=-1, keepdim=True)
    return rest / length


def picard(
    white: Tensor, start: Tensor, contrast: Contrast, *, max_iter: int, tol: float
) -> Rotations:
    """Update all components at once by L-BFGS with a line search."""
    now = start
    sign, gradient, curvature = _slopes(now, white, contrast)
    memory = _Memory()
    change = gradient.abs().amax((-1, -2))
    iterations = 0
    while iterations < max_iter and bool((change > tol).any()):
        iterations += 1
        going = change > tol
        direction = -memory.applied(gradient, curvature)
        # Uphill or nowhere: the memory is of no use here.
        lost = _inner(direction, gradient) >= 0
        direction = torch.where(lost[..., None, None], -gradient / curvature, direction)
        step, moved = _search(now, white, direction, sign, contrast)
        now = torch.where(going[..., None, None], moved, now)
        new_sign, new_gradient, curvature = _slopes(now, white, contrast)
        same = (new_sign == sign).all(-1) & ~lost
        memory.add(step[..., None, None] * direction, new_gradient - gradient, valid=same & going)
        sign, gradient = new_sign, new_gradient
        change = torch.where(going, gradient.abs().amax((-1, -2)), change)
    return Rotations(matrices=now, iterations=iterations, change=change, tol=tol)


class _Memory:
    """L-BFGS pairs, with weight 0 for items whose pair does not count."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, step: Tensor, difference: Tensor, *, valid: Tensor) -> None:
        inner = _inner(step, difference)
        valid = valid & (inner > 0)
        # A pair that does not count gets weight 0, and so do older ones.
        self._pairs = [(s, d, torch.where(valid, w, 0.0)) for s, d, w in self._pairs]
        weight = torch.where(valid, 1 / inner.masked_fill(~valid, 1.0), 0.0)
        self._pairs = [*self._pairs, (step, difference, weight)][-MEMORY:]

    def applied(self, gradient: Tensor, curvature: Tensor) -> Tensor:
        """Return the inverse Hessian times the gradient by the two-loop recursion."""
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
    """Return the sign of each source's contrast, the gradient, and the curvature of pairs."""
    sources = compute_sources(now, white)
    slope, slope_of_slope = contrast.slopes(sources)
    cross = (slope @ sources.transpose(-1, -2) / sources.shape[-1]).to(now.device)
    kappa = slope_of_slope.to(now.device) - cross.diagonal(dim1=-2, dim2=-1)
    # The contrast falls towards heavy or flat tails, its negative towards the other.
    sign = torch.where(kappa < 0, -1.0, 1.0).to(cross)
    cross, kappa = cross * sign[..., None], kappa.abs()
    gradient = (cross - cross.transpose(-1, -2)) / 2
    curvature = ((kappa[..., :, None] + kappa[..., None, :]) / 2).clamp(min=SMALLEST_CURVATURE)
    return sign, gradient, curvature


def _search(
    now: Tensor, white: Tensor, direction: Tensor, sign: Tensor, contrast: Contrast
) -> tuple[Tensor, Tensor]:
    """Return the first step of 1, ½, ¼ … that does not raise the value, up to rounding."""

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
