"""Principal directions of standardised signals, without a matrix of all signals.

For few channels, from the covariance in one pass. For many, by block Lanczos: power iterations
would need twice as many passes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.signals import (
    ChannelStatistics,
    Signals,
    centred_in,
    working_dtype,
)

FEW_CHANNELS = 1024
"""Their covariance takes 8 MiB and its eigenvectors less than a second."""
OVERSAMPLE = 12
"""Extra vectors; ten are usual, and twelve fill whole registers."""
MAX_PASSES = 12
TOLERANCE = 1e-3
"""Relative residual of an eigenvector, far below the noise of ten thousand rows."""
RANK_TOLERANCE = 1e-6
"""Relative variance that counts as rounding."""

DEPENDENT = 1e-13
"""Relative squared length that counts as rounding in float64."""


@final
@dataclass(frozen=True, kw_only=True)
class Subspace:
    """Orthonormal directions of standardised channels."""

    basis: Tensor
    """(channels, components)"""
    variances: Tensor
    """(components), largest first."""
    passes: int
    residual: float
    """Largest relative residual of a direction as an eigenvector."""

    @property
    def converged(self) -> bool:
        return self.residual <= TOLERANCE


@final
@dataclass(frozen=True, kw_only=True)
class Standardised:
    """Signals with mean 0 and optionally variance 1; a constant channel is 0."""

    signals: Signals
    statistics: ChannelStatistics
    factor: Tensor
    """(channels): scale of centred channels."""

    @classmethod
    def of(
        cls,
        signals: Signals,
        statistics: ChannelStatistics,
        *,
        unit_variance: bool = True,
    ) -> "Standardised":
        live = ~statistics.constant
        # One scale for all channels, so that results do not depend on the unit of signals.
        common = statistics.spread.square().mean().sqrt().expand_as(statistics.spread)
        scale = statistics.spread if unit_variance else common
        factor = torch.where(live, 1 / scale.masked_fill(~live, 1.0), 0.0)
        return cls(signals=signals, statistics=statistics, factor=factor)

    def centred(self) -> Iterator[Tensor]:
        """Yield chunks minus the mean, in one buffer."""
        mean: Tensor | None = None
        scratch: Tensor | None = None
        for chunk in self.signals:
            if mean is None:
                mean = self.statistics.mean.to(chunk.device, working_dtype(chunk.dtype))
            scratch = centred_in(scratch, chunk, mean)
            yield scratch[: len(chunk)]

    def covariance_times(self, vectors: Tensor) -> Tensor:
        """Return covariance @ vectors in one pass, summed in float64."""
        factor = self.factor.to(vectors.device, vectors.dtype)[:, None]
        scaled = factor * vectors
        total = torch.zeros_like(vectors, dtype=torch.float64)
        for chunk in self.centred():
            total += chunk.T @ (chunk @ scaled)
        return (total * factor / self.statistics.rows).to(vectors.dtype)

    def covariance(self) -> Tensor:
        """Return the covariance in float64, in one pass."""
        total: Tensor | None = None
        for chunk in self.centred():
            product = chunk.T @ chunk
            total = product.double() if total is None else total.add_(product)
        assert total is not None
        factor = self.factor.to(total)
        return total.mul_(factor[:, None]).mul_(factor / self.statistics.rows)

    def projected(self, basis: Tensor) -> Tensor:
        """Return the signals along `basis`, (rows, components), in one pass."""
        scaled = self.factor.to(basis)[:, None] * basis
        return torch.cat([chunk @ scaled for chunk in self.centred()])


def principal_subspace(
    signals: Standardised, components: int, *, generator: torch.Generator
) -> Subspace:
    """Return the directions of largest variance; raise if the rank is too low."""
    rows, channels = signals.statistics.rows, len(signals.factor)
    live = int((~signals.statistics.constant).sum())
    if components > min(live, rows - 1):
        raise ConfigError(
            f"components must be at most {min(live, rows - 1)} for {rows} rows and {live} channels "
            f"that vary, got {components}. Write fewer components, or give more data."
        )
    width = min(components + OVERSAMPLE, channels)
    if channels <= max(FEW_CHANNELS, 4 * width):
        result = _by_covariance(signals, components)
    else:
        result = _by_lanczos(signals, components, width=width, generator=generator)
    rank = int((result.variances > RANK_TOLERANCE * result.variances[0]).sum())
    if rank < components:
        raise ConfigError(
            f"components must be at most {rank}, the rank of the signals, got {components}."
        )
    # Constant channels are exactly zero.
    stored = (signals.factor != 0).to(result.basis)
    return replace(result, basis=result.basis * stored[:, None])


def _by_covariance(signals: Standardised, components: int) -> Subspace:
    values, vectors = torch.linalg.eigh(signals.covariance())
    basis = vectors[:, -components:].flip(1)
    return Subspace(
        basis=basis.to(_work(signals)),
        variances=values[-components:].flip(0),
        passes=1,
        residual=0.0,
    )


def _by_lanczos(
    signals: Standardised, components: int, *, width: int, generator: torch.Generator
) -> Subspace:
    first = next(iter(signals.centred()))
    # Drawn on the CPU, so that every device starts alike.
    drawn = torch.randn((len(signals.factor), width), generator=generator, dtype=torch.float64)
    block = _orthonormal(drawn.to(first.device, first.dtype))
    vectors, images = block[:, :0], block[:, :0]
    for passes in range(1, MAX_PASSES + 1):
        image = signals.covariance_times(block)
        vectors, images = torch.cat([vectors, block], 1), torch.cat([images, image], 1)
        matched = _best_in(vectors, images, components, passes=passes)
        if matched.converged or vectors.shape[1] + width > len(signals.factor):
            break
        block = image - vectors @ (vectors.T @ image)
        block = _orthonormal(block)
        # Once more, because cancellation leaves rounding errors.
        block = _orthonormal(block - vectors @ (vectors.T @ block))
    return matched


def _best_in(vectors: Tensor, images: Tensor, components: int, *, passes: int) -> Subspace:
    small = (vectors.T @ images).double().cpu()
    values, weights = torch.linalg.eigh((small + small.T) / 2)
    variances = values[-components:].flip(0).to(vectors.device)
    weights = weights[:, -components:].flip(1).to(vectors)
    basis = vectors @ weights
    distance = (images @ weights - basis * variances.to(basis)).norm(dim=0).double()
    residual = float((distance / variances.clamp(min=1e-30)).max())
    return Subspace(basis=basis, variances=variances, passes=passes, residual=residual)


def _orthonormal(block: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span, with zeros for dependent columns.

    Uses the Gram matrix in float64, since a QR of tall matrices is slow on a GPU. Twice, because
    the first pass leaves rounding errors.
    """
    for _ in range(2):
        wide = block.double()
        values, vectors = torch.linalg.eigh((wide.T @ wide).cpu())
        saved = values > DEPENDENT * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
        scale = torch.where(saved, values.where(saved, 1.0).rsqrt(), 0.0)
        block = (wide @ (vectors * scale).to(wide.device)).to(block.dtype)
    return block


def _work(signals: Standardised) -> torch.dtype:
    return next(iter(signals.centred())).dtype
