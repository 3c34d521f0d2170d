"""Contrasts: functions by which a source is told from noise.

Each has a density's negative logarithm G (up to a factor), its derivative g, which moves the
directions, and the mean of g′, which says how curved G is there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

ContrastName: TypeAlias = Literal["logcosh", "cube", "exp"]

GAUSSIAN_LOGCOSH = 0.3745672075
"""The mean of log cosh over a standard normal distribution."""


@final
@dataclass(frozen=True, kw_only=True)
class Contrast:
    """G, and what is needed of its derivatives; sources are (…, components, rows)."""

    value: Callable[[Tensor], Tensor]
    """Returns the mean of G over rows, (…, components)."""
    slopes: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Returns g, (…, components, rows), and the mean of g′ over rows, (…, components)."""


def log_cosh(x: Tensor) -> Tensor:
    """Return log cosh x, for large x too."""
    size = x.abs()
    return size + torch.log1p(torch.exp(-2 * size)) - math.log(2)


def negentropy(sources: Tensor) -> Tensor:
    """Return how far from a normal distribution sources of variance 1 are, (…, components)."""
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


CONTRASTS: Mapping[ContrastName, Contrast] = MappingProxyType(
    {
        "logcosh": Contrast(value=lambda x: log_cosh(x).mean(-1), slopes=_logcosh_slopes),
        "exp": Contrast(value=lambda x: -torch.exp(-x.square() / 2).mean(-1), slopes=_exp_slopes),
        "cube": Contrast(value=lambda x: x.square().square().mean(-1) / 4, slopes=_cube_slopes),
    }
)
