"""`ICA`: independent components of signals, ordered by variance, with positive largest loadings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.collect import Collected, clip_signals, collect
from narrowcast.workloads.sft.ica.networks import check_number, check_type, check_whole
from narrowcast.workloads.sft.ica.signals import (
    ChannelStatistics,
    Finding,
    MappedSignals,
    Signals,
    channel_statistics,
    storage_for,
)
from narrowcast.workloads.sft.ica.solvers import (
    CONTRASTS,
    ContrastName,
    Rotations,
    compute_sources,
    fastica_deflation,
    fastica_parallel,
    negentropy,
    picard,
    random_rotations,
)
from narrowcast.workloads.sft.ica.subspace import Standardised, Subspace, principal_subspace

LOUD_ROWS = 0.01
"""Share of rows for `loud_row_share`."""
SolverName: TypeAlias = Literal["parallel", "deflation", "picard"]
SOLVERS: Mapping[SolverName, Callable[..., Rotations]] = {
    "parallel": fastica_parallel,
    "deflation": fastica_deflation,
    "picard": picard,
}
STABLE = 0.9
"""Lower agreement is reported: a correlation of 0.9 leaves a fifth of the variance."""
LOUD = 0.5
"""A larger share of variance in 1 % of rows is reported; Laplace has 0.16, normal 0.04."""
PERCENTILE = "a percentile above 50 and below 100"
TOLERANCE = "a number between 0 and 1, such as 1e-4"


@final
@dataclass(frozen=True, kw_only=True)
class Components:
    """Independent components; tensors are on the CPU."""

    loadings: Tensor
    """(channels, components): correlations, if channels were standardised."""
    unmixing: Tensor
    """(components, channels): centred channels to components of variance 1."""
    mean: Tensor
    """(channels)"""
    explained: Tensor
    """(components): share of the variance."""
    negentropy: Tensor
    """(components): distance from a normal distribution."""
    stability: Tensor
    """(components): agreement between random initialisations, 0 to 1."""
    loud_row_share: Tensor
    """(components): share of variance in the loudest 1 % of rows."""
    rows: int
    dtype: torch.dtype
    """Storage dtype."""
    findings: tuple[Finding, ...] = ()

    @property
    def count(self) -> int:
        return self.loadings.shape[1]

    def sources(self, signals: Tensor) -> Tensor:
        """Return the components over rows of signals, (rows, components)."""
        return (signals.to(self.mean.dtype) - self.mean) @ self.unmixing.T


class White(NamedTuple):
    """Whitened signals and their map to channels."""

    signals: Tensor
    """(components, rows)"""
    loadings: Tensor
    """(channels, components)"""
    unmixing: Tensor
    """(components, channels)"""


def whiten(projected: Tensor, basis: Tensor, factor: Tensor) -> White:
    """Whiten projections on an orthonormal basis; `factor` scaled the centred channels."""
    wide = projected.double()
    values, vectors = torch.linalg.eigh((wide.T @ wide / len(wide)).cpu())
    values, vectors = (each.to(wide.device) for each in (values.flip(0), vectors.flip(1)))
    back = (basis.double() @ vectors) * values.sqrt()
    forth = (basis.double() @ vectors) / values.sqrt() * factor.to(basis.device)[:, None]
    signals = (wide @ vectors / values.sqrt()).T.contiguous()
    return White(signals=signals, loadings=back, unmixing=forth.T)


def loud_rows(rows: int) -> int:
    """Return 1 % of the rows, at least one."""
    return max(1, round(LOUD_ROWS * rows))


def canonical(
    white: White, rotation: Tensor, stability: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return loadings, unmixing, negentropy, stability and loud row share in canonical order."""
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


@final
@dataclass(frozen=True, kw_only=True)
class ICA:
    """Settings of the analysis. The same seed and data give the same result."""

    components: int = 20
    solver: SolverName = "picard"
    """`parallel` (FastICA) has the same solutions but often oscillates on activations."""
    contrast: ContrastName = "logcosh"
    ica_dtype: str | torch.dtype | None = None
    """Storage dtype of the signals, see `storage_for`."""
    restarts: int = 4
    """Random initialisations; the one with the largest negentropy is used."""
    max_iter: int = 200
    tol: float = 1e-4
    seed: int = 0
    standardise: bool = True
    """Scale every channel to variance 1."""
    clip_activations: float | None = None
    """Clip each channel to its percentiles 100 - p and p, which also removes rarer sources."""
    device: torch.device | None = None
    """Where to store and compute; None: where the signals are."""

    def __post_init__(self) -> None:
        _require("solver", self.solver, get_args(SolverName))
        _require("contrast", self.contrast, get_args(ContrastName))
        for name in ("components", "restarts", "max_iter"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("seed", self.seed, least=0)
        check_type("standardise", self.standardise, bool, "True or False")
        clip = self.clip_activations
        if clip is not None and not 50 < check_number("clip_activations", clip, PERCENTILE) < 100:
            raise ConfigError(
                f"clip_activations must be {PERCENTILE}, got {clip}. Write 99 to clip each channel "
                "to its percentiles 1 and 99, or None for no clipping."
            )
        if not 0 < check_number("tol", self.tol, TOLERANCE) < 1:
            raise ConfigError(f"tol must be {TOLERANCE}, got {self.tol}.")

    def collect(self, source: Signals, *, model_dtype: torch.dtype | None = None) -> Collected:
        """Store the signals of an expensive source, such as a model."""
        return collect(self._here(source), storage_for(self.ica_dtype, model_dtype))

    def fit(self, signals: Signals | Collected) -> Components:
        """Return the components of signals, in a few passes without a copy."""
        (components,) = self.fit_each([signals])
        return components

    def fit_each(self, signals: Sequence[Signals | Collected]) -> list[Components]:
        """Return the components of several sets of signals with equally many rows."""
        reduced = [self._reduce(each, location) for location, each in enumerate(signals)]
        if len({each.statistics.rows for each in reduced}) > 1:
            raise ConfigError(
                "All signals must have the same number of rows. Fit them one at a time."
            )
        white = torch.stack([each.white.signals for each in reduced])
        rotations, solved = self._solve(white)
        return [
            self._finish(each, white[i], rotations.matrices[i], solved, first=i * self.components)
            for i, each in enumerate(reduced)
        ]

    def _reduce(self, inputs: Signals | Collected, position: int) -> "_Reduced":
        known: tuple[Finding, ...] = ()
        if isinstance(inputs, Collected):
            known = inputs.findings
            inputs = inputs.signals
        if isinstance(inputs, Tensor | np.ndarray):
            raise ConfigError(
                f"signals must be a source of chunks, got a {type(inputs).__name__}. Write "
                "ArraySignals(array)."
            )
        signals = self._here(inputs)
        if self.clip_activations is not None:
            signals = clip_signals(signals, self.clip_activations)
        # Statistics of the stored signals: rounding moves a mean.
        statistics = channel_statistics(signals)
        standard = Standardised.of(signals, statistics, unit_variance=self.standardise)
        generator = torch.Generator().manual_seed(self.seed + position)
        subspace = principal_subspace(standard, self.components, generator=generator)
        white = whiten(standard.projected(subspace.basis), subspace.basis, standard.factor)
        return _Reduced(
            white=white,
            statistics=statistics,
            total=float((statistics.spread * standard.factor).square().sum()),
            dtype=next(iter(signals)).dtype,
            findings=(*known, *_signal_findings(statistics, subspace)),
        )

    def _here(self, signals: Signals) -> Signals:
        device = self.device
        return signals if device is None else MappedSignals(signals, lambda c: c.to(device))

    def _solve(self, white: Tensor) -> tuple[Rotations, tuple[Finding, ...]]:
        """Solve all initialisations at once, in float64 if float32 is not finite."""
        generator = torch.Generator().manual_seed(self.seed)
        # The same initialisations for every layer, however many there are.
        start = random_rotations((self.restarts,), self.components, generator=generator)
        start = start.expand(len(white), *start.shape)
        solve = SOLVERS[self.solver]
        matches: tuple[Finding, ...] = ()
        for dtype in (torch.float32, torch.float64):
            rotations = solve(
                white[:, None].to(dtype),
                start.to(dtype),
                CONTRASTS[self.contrast],
                max_iter=self.max_iter,
                tol=self.tol,
            )
            if rotations.finite:
                return rotations, (*matches, *self._unconverged(rotations))
            what = f"{self.solver} with {self.contrast} is not finite in {dtype}"
            matches = (Finding("solver", what, "It was solved in float64"),)
        raise ConfigError(
            f"{self.solver} with {self.contrast} is not finite even in float64 because the signals "
            "have extreme rows. Write clip_activations=99, or contrast=logcosh, which grows more "
            "slowly."
        )

    def _unconverged(self, rotations: Rotations) -> Iterator[Finding]:
        left = int((~rotations.converged).sum())
        other_solver = "" if self.solver == "picard" else ", solver=picard"
        if left:
            what = (
                f"{left} of {rotations.converged.numel()} solutions had not converged after "
                f"{self.max_iter} iterations (last change {float(rotations.change.max()):.1g})"
            )
            answer = (
                f"Write a larger max_iter{other_solver} or fewer components, and check the "
                "stability of each component"
            )
            yield Finding("convergence", what, answer)

    def _finish(
        self,
        reduced: "_Reduced",
        white: Tensor,
        rotations: Tensor,
        solved: tuple[Finding, ...],
        *,
        first: int,
    ) -> Components:
        wide = rotations.double()
        scored = [float(negentropy(compute_sources(each, white)).sum()) for each in wide]
        best = scored.index(max(scored))
        others = torch.cat([wide[:best], wide[best + 1 :]])
        stability = torch.ones(self.components, dtype=torch.float64, device=wide.device)
        if len(others):
            # Products of rows are correlations: each with its best match in the other rotations.
            stability = (wide[best] @ others.transpose(-1, -2)).abs().amax(-1).mean(0)
        loadings, unmixing, scores, stability, loud = canonical(
            reduced.white, wide[best], stability
        )
        rows = reduced.statistics.rows
        return Components(
            loadings=loadings.float().cpu(),
            unmixing=unmixing.float().cpu(),
            mean=reduced.statistics.mean.float().cpu(),
            explained=(loadings.square().sum(0) / reduced.total).cpu(),
            negentropy=scores.cpu(),
            stability=stability.clamp(max=1.0).cpu(),
            loud_row_share=loud.cpu(),
            rows=rows,
            dtype=reduced.dtype,
            findings=(
                *reduced.findings,
                *solved,
                *_component_findings(stability, loud, rows=rows, first=first),
            ),
        )


class _Reduced(NamedTuple):
    white: White
    statistics: ChannelStatistics
    total: float
    """Variance of the standardised signals."""
    dtype: torch.dtype
    findings: tuple[Finding, ...]


def _signal_findings(statistics: ChannelStatistics, subspace: Subspace) -> Iterator[Finding]:
    if constant := int(statistics.constant.sum()):
        what = f"{constant} of {len(statistics.spread)} channels are constant"
        yield Finding("constant", what, "They are in no component")
    if not subspace.converged:
        what = (
            f"after {subspace.passes} passes a direction is {subspace.residual:.1g} from an "
            "eigenvector, so the last components share variance with others"
        )
        yield Finding("subspace", what, "Write fewer components, or treat the last ones with care")


def _component_findings(
    stability: Tensor, loud: Tensor, *, rows: int, first: int
) -> Iterator[Finding]:
    low = [first + i for i, score in enumerate(stability.tolist()) if score < STABLE]
    if low:
        what = f"components {', '.join(map(str, low))} differ between random initialisations"
        yield Finding("stability", what, "Give more rows, or write fewer components")
    count = loud_rows(rows)
    answer = (
        "Skip them with skip_first if they are the first tokens of sequences, or write "
        "clip_activations=99"
    )
    for number, share in enumerate(loud.tolist(), start=first):
        if share > LOUD:
            what = (
                f"{share:.0%} of component {number} comes from {100 * count / rows:.2g} % of "
                f"rows, {count:,} of {rows:,}"
            )
            yield Finding("loud rows", what, answer)


def _require(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.")
