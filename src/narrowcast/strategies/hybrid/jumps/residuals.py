"""What predictions got wrong: actual less predicted movement, a weight tensor at a time."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from narrowcast.strategies.hybrid.jumps.stored import LowRank, low_rank, probe_columns

CAPACITY = 1000
"""Residuals that are kept."""


@dataclass(frozen=True)
class LayerResidual:
    """How far, and in which direction, one tensor went from where it was predicted to go."""

    magnitude: float
    """The norm of actual less predicted movement."""
    cosine: float
    """Between the actual and the predicted movement; 0 where one of them is none."""
    scale_error: float
    """What is to be added to a factor of 1 on the prediction to bring it nearest; signed."""


@dataclass(frozen=True)
class Residual:
    """What one prediction got wrong."""

    step: int
    horizon: int
    """Steps that were predicted."""
    layers: tuple[LayerResidual, ...]
    features: tuple[float, ...]
    """Of the run as it was then; by these similar residuals are found."""
    confidence: float = 1.0
    """How sure the prediction was of itself, from 0 to 1."""
    predictor: str = ""
    """Whose prediction it was: each errs in its own way."""

    @property
    def error(self) -> float:
        """The mean scale error of all tensors."""
        return math.fsum(r.scale_error for r in self.layers) / max(len(self.layers), 1)


@dataclass(frozen=True)
class ErrorStatistics:
    """Running statistics of `Residual.error`, of all residuals there have been (Welford)."""

    count: int = 0
    mean: float = 0.0
    mean_absolute: float = 0.0
    squares: float = 0.0
    """The sum of squared distances to the mean."""

    @property
    def std(self) -> float:
        """The standard deviation; 0 of fewer than two."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def after(self, error: float) -> "ErrorStatistics":
        """Return the statistics with one error more."""
        count, off = self.count + 1, error - self.mean
        mean = self.mean + off / count
        return replace(
            self,
            count=count,
            mean=mean,
            mean_absolute=self.mean_absolute + (abs(error) - self.mean_absolute) / count,
            squares=self.squares + off * (error - mean),
        )


@torch.no_grad()
def measure(predicted: Sequence[Tensor], actual: Sequence[Tensor]) -> tuple[LayerResidual, ...]:
    """Return what was wrong, tensor by tensor. Waits for the device, once for all of them."""
    numbers = torch.stack(
        [_sums(p.flatten(), a.flatten()) for p, a in zip(predicted, actual, strict=True)]
    ).tolist()
    return tuple(_layer(*each) for each in numbers)


def compress(residual: Tensor, *, rank: int = 1, generator: torch.Generator) -> LowRank:
    """Return a matrix of residuals in low rank, in fp32; exact where it is of that rank.

    The generator is the host's. More dimensions than two are taken for the columns.
    """
    matrix = residual.reshape(residual.shape[0], -1).float()
    probe = probe_columns(matrix.shape[1], rank, generator=generator)
    return low_rank(matrix, rank=rank, probe=probe.to(matrix.device))


@final
class Residuals:
    """The last thousand residuals, and statistics of all there have been."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._held: deque[Residual] = deque(maxlen=capacity)
        self.statistics = ErrorStatistics()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> tuple[Residual, ...]:
        """The residuals, the oldest first."""
        return tuple(self._held)

    def add(self, residual: Residual) -> None:
        """Keep one more; the oldest gives way."""
        self._held.append(residual)
        self.statistics = self.statistics.after(residual.error)

    def most_similar(
        self, features: Sequence[float], n: int = 10, *, predictor: str | None = None
    ) -> list[Residual]:
        """Return the residuals whose features point most nearly the same way, the nearest first.

        Of equal ones the newer comes first. Features of another length are no match, nor is
        another predictor if one is given.
        """
        mine_alone = [r for r in reversed(self._held) if predictor in (None, r.predictor)]
        alike = [r for r in mine_alone if len(r.features) == len(features)]
        if not alike or not n:
            return []
        theirs, mine = np.array([r.features for r in alike]), np.array(features)
        norms = np.linalg.norm(theirs, axis=1) * np.linalg.norm(mine)
        cosines = np.divide(theirs @ mine, norms, out=np.zeros(len(alike)), where=norms > 0)
        return [alike[i] for i in np.argsort(-cosines, kind="stable")[:n]]

    def state_dict(self) -> dict[str, Any]:
        """Return all residuals and the statistics, as plain values."""
        return {
            "held": [asdict(residual) for residual in self._held],
            "statistics": asdict(self.statistics),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where saved residuals stood."""
        self._held = deque(map(_residual_from, state["held"]), maxlen=self._held.maxlen)
        self.statistics = ErrorStatistics(**state["statistics"])


def _sums(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return the norm of the difference, and the products that a cosine is made of."""
    wrong = torch.linalg.vector_norm(actual - predicted)
    squares = torch.dot(predicted, predicted), torch.dot(actual, actual)
    return torch.stack([wrong, torch.dot(predicted, actual), *squares])


def _layer(wrong: float, product: float, predicted: float, actual: float) -> LayerResidual:
    norms = math.sqrt(predicted) * math.sqrt(actual)
    return LayerResidual(
        magnitude=wrong,
        cosine=max(-1.0, min(1.0, product / norms)) if norms > 0 else 0.0,
        scale_error=product / predicted - 1 if predicted > 0 else 0.0,
    )


def _residual_from(state: Mapping[str, Any]) -> Residual:
    return Residual(
        step=int(state["step"]),
        horizon=int(state["horizon"]),
        layers=tuple(LayerResidual(**each) for each in state["layers"]),
        features=tuple(map(float, state["features"])),
        confidence=float(state["confidence"]),
        predictor=str(state["predictor"]),
    )
