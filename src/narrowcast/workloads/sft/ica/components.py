"""Components as they are known by: in an order and with a sign of their own, and scores.

Solvers return components in any order and with any sign. Here they are ordered by how much of the
signals they explain, most first, and each has the sign that makes its heaviest loading positive, so
that "component 3" is the same thing in two runs on the same data.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.workloads.sft.ica.findings import Finding
from narrowcast.workloads.sft.ica.solvers.contrast import negentropy
from narrowcast.workloads.sft.ica.solvers.rotation import compute_sources

LOUD_ROWS = 0.01
"""Share of the rows whose weight in a component is measured."""


@final
@dataclass(frozen=True, kw_only=True)
class Components:
    """Independent components of signals; tensors are on the CPU."""

    loadings: Tensor
    """(channels, components): the correlation of each channel with each component, where channels
    were standardised."""
    unmixing: Tensor
    """(components, channels): takes centred channels to components of variance 1."""
    mean: Tensor
    """(channels)."""
    explained: Tensor
    """(components): the share of all variance."""
    negentropy: Tensor
    """(components): distance from a normal distribution."""
    stability: Tensor
    """(components), 0 to 1: how alike it came out of other beginnings; 1 with one only."""
    loud_row_share: Tensor
    """(components), 0 to 1: the share of its variance that comes from its loudest rows, 1 % of
    all (`loud_rows`)."""
    rows: int
    dtype: torch.dtype
    """What the signals were stored in, in the end."""
    findings: tuple[Finding, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return self.loadings.shape[1]

    def sources(self, signals: Tensor) -> Tensor:
        """Return the course of each component over rows of signals, (rows, components)."""
        return (signals.to(self.mean.dtype) - self.mean) @ self.unmixing.T


@final
@dataclass(frozen=True, kw_only=True)
class White:
    """Signals of variance 1 and without correlation, and the way back to channels."""

    signals: Tensor
    """(components, rows)."""
    loadings: Tensor
    """(channels, components): of each channel on each white signal."""
    unmixing: Tensor
    """(components, channels)."""


def whiten(projected: Tensor, basis: Tensor, factor: Tensor) -> White:
    """Make projections on an orthonormal basis white, exactly, whatever the basis is.

    `factor` is what centred channels were multiplied by.
    """
    wide = projected.double()
    values, vectors = torch.linalg.eigh((wide.T @ wide / len(wide)).cpu())
    values, vectors = (each.to(wide.device) for each in (values.flip(0), vectors.flip(1)))
    back = (basis.double() @ vectors) * values.sqrt()
    forth = (basis.double() @ vectors) / values.sqrt() * factor.to(basis.device)[:, None]
    signals = (wide @ vectors / values.sqrt()).T.contiguous()
    return White(signals=signals, loadings=back, unmixing=forth.T)


def agreement(one: Tensor, others: Tensor) -> Tensor:
    """Return how alike each component of a rotation is to the nearest in others, on average.

    Rotations of one set of white signals: the products of their rows are correlations of sources.
    """
    return (one @ others.transpose(-1, -2)).abs().amax(-1).mean(0)


def best_rotation(rotations: Tensor, white: Tensor) -> int:
    """Return which of some rotations (restarts, …) has the least normal components."""
    scores = [float(negentropy(compute_sources(each, white)).sum()) for each in rotations]
    return max(range(len(scores)), key=scores.__getitem__)


def loud_rows(rows: int) -> int:
    """Return how many rows `loud_row_share` is about: 1 % of them, and at least one."""
    return max(1, round(LOUD_ROWS * rows))


def canonical(
    white: White, rotation: Tensor, stability: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return loadings, unmixing, negentropy, stability and loud row share, in order and sign."""
    rotation = rotation.to(white.loadings)
    loadings, unmixing = white.loadings @ rotation.T, rotation @ white.unmixing
    order = loadings.square().sum(0).argsort(descending=True, stable=True)
    loadings, unmixing = loadings[:, order], unmixing[order]
    heaviest = loadings.gather(0, loadings.abs().argmax(0, keepdim=True))[0]
    sign = torch.where(heaviest < 0, -1.0, 1.0).to(loadings)
    sources = (rotation @ white.signals)[order]
    powers = sources.square()
    share = powers.topk(loud_rows(sources.shape[1]), -1).values.sum(-1) / powers.sum(-1)
    stability = stability.to(order.device)[order]
    return loadings * sign, unmixing * sign[:, None], negentropy(sources), stability, share
