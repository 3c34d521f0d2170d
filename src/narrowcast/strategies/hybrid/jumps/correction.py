"""How much longer or shorter a predicted movement is to be, by what earlier ones got wrong.

Two opinions on the scale error of each tensor are blended: what similar residuals had there, the
newer the more, and a ridge regression on features of the tensor, which has something to say of
tensors and moments that were not seen yet. Both are signed; a scale is never changed by more than a
fifth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.residuals import Residual, Residuals

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """The constants of a correction, those of hybrid-predict-trainer where it has them."""

    similar: int = 10
    """Residuals that are asked."""
    decay: float = 0.95
    """What a hundred steps leave of a residual's word."""
    of_similar: float = 0.7
    """The part of the blend that similar residuals have; ridge regression has the rest."""
    largest: float = 0.2
    """The bound of a correction."""
    ridge: float = 1.0
    """The penalty on the regression's coefficients: one residual's worth."""


@final
class Correction:
    """Learns the scale errors of one predictor, and corrects by them. All of it is on the host."""

    def __init__(
        self, settings: CorrectionSettings | None = None, *, predictor: str | None = None
    ) -> None:
        """Correct a predictor by its own residuals; None by everybody's."""
        self.settings = CorrectionSettings() if settings is None else settings
        self._predictor = predictor
        self._products: Matrix = np.zeros((0, 0))
        self._targets: Matrix = np.zeros(0)

    def update(self, residual: Residual, features: Sequence[Sequence[float]]) -> None:
        """Let the regression learn from a residual, given the features of each tensor then."""
        x = np.array(features, dtype=np.float64)
        y = np.array([layer.scale_error for layer in residual.layers])
        if not self._targets.size:
            self._products, self._targets = np.zeros((x.shape[1],) * 2), np.zeros(x.shape[1])
        # An error of a thousand is of a prediction of nearly nothing; it would drown all others.
        self._products = self._products + x.T @ x
        self._targets = self._targets + x.T @ y.clip(-1, 1)

    def regressed(self, features: Sequence[Sequence[float]]) -> list[float]:
        """Return what ridge regression says of each tensor's scale error; 0 before any residual."""
        x = np.array(features, dtype=np.float64)
        if not self._targets.size:
            return [0.0] * len(x)
        penalty = self.settings.ridge * np.eye(len(self._targets))
        solved = np.linalg.solve(self._products + penalty, self._targets)
        return [float(value) for value in x @ solved]

    def remembered(self, residuals: Sequence[Residual], *, step: int) -> list[float]:
        """Return the mean scale error of each tensor in residuals, the newer and surer the more."""
        weights = [self.settings.decay ** ((step - r.step) / 100) * r.confidence for r in residuals]
        total = math.fsum(weights)
        if total <= 0:
            return [0.0] * (len(residuals[0].layers) if residuals else 0)
        errors = np.array([[layer.scale_error for layer in r.layers] for r in residuals])
        return [float(e) for e in np.array(weights) @ errors.clip(-1, 1) / total]

    def corrections(
        self,
        residuals: Residuals,
        *,
        step: int,
        features: Sequence[float],
        layer_features: Sequence[Sequence[float]],
    ) -> list[float]:
        """Return what to add to a factor of 1 on the prediction of each tensor; 0 at first."""
        similar = residuals.most_similar(features, self.settings.similar, predictor=self._predictor)
        regressed = self.regressed(layer_features)
        if not similar:
            return [0.0] * len(regressed)
        share, bound = self.settings.of_similar, self.settings.largest
        both = zip(self.remembered(similar, step=step), regressed, strict=True)
        return [max(-bound, min(bound, share * r + (1 - share) * g)) for r, g in both]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums that the regression is solved from."""
        return {"products": self._products.tolist(), "targets": self._targets.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved correction stood."""
        self._targets = np.array(state["targets"], dtype=np.float64)
        shape = (len(self._targets),) * 2
        self._products = np.array(state["products"], dtype=np.float64).reshape(shape)


@torch.no_grad()
def corrected(deltas: Sequence[Tensor], corrections: Sequence[float]) -> list[Tensor]:
    """Return movements, each made longer or shorter by its correction."""
    return list(torch._foreach_mul(list(deltas), [1 + c for c in corrections]))


def micro_correction(
    deltas: Sequence[Tensor], corrections: Sequence[float], *, into: int, interval: int
) -> list[Tensor]:
    """Return the movement of step `into` of a predicted stretch, corrected every `interval` steps.

    `deltas` are those of the prediction, not of the step before: corrections do not pile up. An
    interval of 0 corrects none.
    """
    due = interval > 0 and into > 0 and into % interval == 0
    return corrected(deltas, corrections) if due else list(deltas)


@torch.no_grad()
def layer_features(history: WeightHistory, *, ahead_steps: int) -> list[list[float]]:
    """Return what a scale error may depend on, a list a tensor. Waits for the device, once.

    One, depth in the model, dimensions, log10 of elements, cosine of the last two movements,
    log10 of the ratio of their norms, log2 of the intervals ahead. Each is about 1 in size.
    """
    last = history.move(len(history) - 2)
    before = history.move(len(history) - 3) if len(history) > 2 else last
    pairs = zip(last, before, strict=True)
    sums = torch.stack([_products(a.flatten(), b.flatten()) for a, b in pairs]).tolist()
    ahead = math.log2(ahead_steps / history.settings.every)
    many = max(len(history.shapes) - 1, 1)
    return [
        [
            1.0,
            i / many,
            len(shape) / 2,
            math.log10(max(shape.numel(), 1)) / 4,
            *_turn(*three),
            ahead,
        ]
        for i, (shape, three) in enumerate(zip(history.shapes, sums, strict=True))
    ]


def _products(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack([torch.dot(one, other), torch.dot(one, one), torch.dot(other, other)])


def _turn(product: float, last: float, before: float) -> tuple[float, float]:
    if last <= 0 or before <= 0:
        return 0.0, 0.0
    ratio = max(-1.0, min(1.0, math.log10(last / before) / 2))
    return product / (math.sqrt(last) * math.sqrt(before)), ratio
