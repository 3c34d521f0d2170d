"""Heads: what a network predicts per row, and the loss. All arithmetic is in fp32."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Protocol, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.workloads.forecast.settings import Objective


class Head(Protocol):
    """Turns the numbers of a network into a forecast; values are windows × channels × rows."""

    outputs: int
    """Numbers per value."""
    metric: str
    """Name of its loss as a metric."""

    def restore(self, raw: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        """Return the network's numbers (…, rows, outputs) in the units of the series."""
        ...

    def losses(self, numbers: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every value."""
        ...

    def point(self, numbers: Tensor) -> Tensor:
        """Return the point forecast of every value."""
        ...

    def quantiles(self, numbers: Tensor, levels: Sequence[float]) -> Tensor | None:
        """Return quantiles (…, rows, levels); None if the head predicts no distribution."""
        ...


def make_head(objective: Objective, *, device: torch.device) -> Head:
    """Return the head of a recipe."""
    if objective.head == "quantile":
        return QuantileHead(objective.quantiles, device=device)
    if objective.head == "student_t":
        return StudentTHead()
    return PointHead(objective.loss, delta=objective.delta)


@final
class PointHead:
    """One number per value, trained with MSE, MAE or the Huber loss."""

    outputs = 1

    def __init__(self, loss: str, *, delta: float = 1.0) -> None:
        self.loss, self.delta = loss, delta
        self.metric = loss

    def restore(self, raw: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        """Return the numbers in the units of the series."""
        return torch.addcmul(centre[..., None], raw.float(), spread[..., None])

    def losses(self, numbers: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every value."""
        error = numbers.squeeze(-1) - y
        if self.loss == "mse":
            return error.square()
        if self.loss == "mae":
            return error.abs()
        return F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=self.delta)

    def point(self, numbers: Tensor) -> Tensor:
        """Return the forecast."""
        return numbers.squeeze(-1)

    def quantiles(self, numbers: Tensor, levels: Sequence[float]) -> Tensor | None:
        """Return None: there is no distribution."""
        return None


@final
class QuantileHead:
    """Several quantiles per value, trained with the pinball loss; the point is the median."""

    metric = "quantile_loss"

    def __init__(self, levels: Sequence[float], *, device: torch.device) -> None:
        self.levels = tuple(levels)
        self.outputs = len(self.levels)
        # Made once: a CUDA graph cannot copy constants from the host.
        self._on_device = torch.tensor(self.levels, device=device)

    def restore(self, raw: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        """Return the numbers in the units of the series."""
        return torch.addcmul(centre[..., None], raw.float(), spread[..., None])

    def losses(self, numbers: Tensor, y: Tensor) -> Tensor:
        """Return twice the mean pinball loss of every value; of many levels, the CRPS."""
        error = y[..., None] - numbers
        losses = torch.maximum(self._on_device * error, (self._on_device - 1) * error)
        return 2 * losses.mean(-1)

    def point(self, numbers: Tensor) -> Tensor:
        """Return the median."""
        return self._sorted(numbers)[..., self.levels.index(0.5)]

    def quantiles(self, numbers: Tensor, levels: Sequence[float]) -> Tensor | None:
        """Return quantiles, interpolated between the trained levels."""
        known = self._sorted(numbers)
        if tuple(levels) == self.levels:
            return known
        trained = torch.tensor(self.levels, dtype=torch.float64)
        columns = []
        for level in levels:
            if not self.levels[0] - 1e-9 <= level <= self.levels[-1] + 1e-9:
                return None
            above = min(max(int(torch.searchsorted(trained, level)), 1), len(self.levels) - 1)
            low, high = self.levels[above - 1], self.levels[above]
            share = min(max((level - low) / (high - low), 0.0), 1.0)
            columns.append(torch.lerp(known[..., above - 1], known[..., above], share))
        return torch.stack(columns, dim=-1)

    def _sorted(self, numbers: Tensor) -> Tensor:
        """Return the quantiles in order: trained separately, they may cross."""
        return numbers.sort(dim=-1).values


@final
class StudentTHead:
    """Degrees of freedom, location and scale per value, trained by likelihood."""

    outputs, metric = 3, "nll"

    def restore(self, raw: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        """Return location, scale and degrees of freedom in the units of the series."""
        location, scale, freedom = raw.float().unbind(-1)
        return torch.stack(
            [
                torch.addcmul(centre, location, spread),
                (F.softplus(scale) + 1e-4) * spread,
                2 + F.softplus(freedom),
            ],
            dim=-1,
        )

    def losses(self, numbers: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of every value."""
        location, scale, freedom = numbers.unbind(-1)
        z = (y - location) / scale
        return (
            scale.log()
            + 0.5 * freedom.log()
            + 0.5 * math.log(math.pi)
            + torch.lgamma(0.5 * freedom)
            - torch.lgamma(0.5 * (freedom + 1))
            + 0.5 * (freedom + 1) * torch.log1p(z.square() / freedom)
        )

    def point(self, numbers: Tensor) -> Tensor:
        """Return the location, which is mean and median."""
        return numbers[..., 0]

    def quantiles(self, numbers: Tensor, levels: Sequence[float]) -> Tensor | None:
        """Return quantiles of the distributions, computed on the CPU. Synchronises."""
        location, scale, freedom = numbers.detach().double().cpu().unbind(-1)
        unit = [torch.from_numpy(student_quantile(level, freedom.numpy())) for level in levels]
        result = location[..., None] + scale[..., None] * torch.stack(unit, dim=-1)
        return result.to(numbers)


_SERIES_ABOVE, _POINTS, _NODES, _HALVINGS = 100.0, 2049, 64, 60


def student_quantile(level: float, freedom: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a quantile of Student's t for 2 or more degrees of freedom, to about 1e-5."""
    if level == 0.5:
        return np.zeros_like(freedom)
    if level < 0.5:
        return -student_quantile(1 - level, freedom)
    z = NormalDist().inv_cdf(level)
    # Cornish-Fisher: Abramowitz and Stegun 26.7.5.
    terms = (
        z**3 + z,
        5 * z**5 + 16 * z**3 + 3 * z,
        3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z,
    )
    many = np.maximum(freedom, _SERIES_ABOVE)
    series = z + terms[0] / (4 * many) + terms[1] / (96 * many**2) + terms[2] / (384 * many**3)
    inverse = np.linspace(1 / _SERIES_ABOVE, 0.5, _POINTS)
    few = np.interp(1 / np.minimum(freedom, _SERIES_ABOVE), inverse, _bisected(level, 1 / inverse))
    return np.where(freedom > _SERIES_ABOVE, series, few)


def _bisected(level: float, freedom: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return quantiles above the median: with t = sqrt(n) tan u, the density is cos(u)^(n-1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    ratio = [math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) for n in freedom]
    constant = np.array(ratio) / math.sqrt(math.pi)
    low, high = np.zeros_like(freedom), np.full_like(freedom, math.pi / 2)
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        points = angle[:, None] * (nodes + 1) / 2
        area = angle / 2 * (np.cos(points) ** (freedom[:, None] - 1) @ weights)
        below = 0.5 + constant * area < level
        low, high = np.where(below, angle, low), np.where(below, high, angle)
    return np.sqrt(freedom) * np.tan(low)
