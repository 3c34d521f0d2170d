"""FastICA: Newton's method on a contrast, for all components at once or one after another.

Hyvärinen, "Fast and robust fixed-point algorithms for independent component analysis" (1999).
"""

import torch
from torch import Tensor

from narrowcast.workloads.sft.ica.solvers.contrast import Contrast
from narrowcast.workloads.sft.ica.solvers.rotation import (
    Rotations,
    compute_sources,
    nearest_rotation,
)


def fastica_parallel(
    white: Tensor, start: Tensor, contrast: Contrast, *, max_iter: int, tol: float
) -> Rotations:
    """Turn all components at once, and make them orthogonal after each iteration."""
    now = start
    change = torch.full(start.shape[:-2], torch.inf, dtype=start.dtype, device=start.device)
    iterations = 0
    while iterations < max_iter and bool((change > tol).any()):
        iterations += 1
        moved = nearest_rotation(_newton(now, white, contrast))
        turned = ((moved * now).sum(-1).abs() - 1).abs().amax(-1)
        going = change > tol
        now = torch.where(going[..., None, None], moved, now)
        change = torch.where(going, turned, change)  # NaN is not above tol: it ends there
    return Rotations(matrices=now, iterations=iterations, change=change, converged=change <= tol)


def fastica_deflation(
    white: Tensor, start: Tensor, contrast: Contrast, *, max_iter: int, tol: float
) -> Rotations:
    """Find one component after another, each orthogonal to those before."""
    result = start[..., :0, :]
    worst = torch.zeros(start.shape[:-2], dtype=start.dtype, device=start.device)
    slowest = 0
    for location in range(start.shape[-2]):
        now = _orthogonalise(start[..., location : location + 1, :], result)
        change = torch.full_like(worst, torch.inf)
        iterations = 0
        while iterations < max_iter and bool((change > tol).any()):
            iterations += 1
            moved = _orthogonalise(_newton(now, white, contrast), result)
            turned = ((moved * now).sum(-1).abs() - 1).abs().amax(-1)
            going = change > tol
            now = torch.where(going[..., None, None], moved, now)
            change = torch.where(going, turned, change)
        result = torch.cat([result, now], -2)
        worst, slowest = torch.maximum(worst, change), max(slowest, iterations)
    return Rotations(matrices=result, iterations=slowest, change=worst, converged=worst <= tol)


def _newton(rotation: Tensor, white: Tensor, contrast: Contrast) -> Tensor:
    slope, curvature = contrast.slopes(compute_sources(rotation, white))
    mean = (slope @ white.transpose(-1, -2) / white.shape[-1]).to(rotation.device)
    return mean - curvature[..., None].to(rotation.device) * rotation


def _orthogonalise(row: Tensor, matched: Tensor) -> Tensor:
    """Return a row of length 1 that is orthogonal to those found."""
    rest = row - (row @ matched.transpose(-1, -2)) @ matched
    rest = rest - (rest @ matched.transpose(-1, -2)) @ matched  # what rounding left of the first
    length: Tensor = rest.norm(dim=-1, keepdim=True)
    return rest / length
