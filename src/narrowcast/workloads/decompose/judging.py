"""How good a decomposition is: how few components it uses, and whether they are the right ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.evaluation.identity_error import importance_error
from narrowcast.workloads.decompose.evaluation.matching import Matched, match_features
from narrowcast.workloads.decompose.evaluation.sparsity import FiringCounts
from narrowcast.workloads.decompose.losses.catalogue import build_loss
from narrowcast.workloads.decompose.losses.faithfulness import unfaithfulness
from narrowcast.workloads.decompose.model import DecompositionModel
from narrowcast.workloads.decompose.settings import JudgeSection
from narrowcast.workloads.decompose.subject import LanguageSubject, ToySubject

RIGHT_COSINE, RIGHT_NORMS = 0.99, (0.95, 1.06)
"""What a component has in common with the column it stands for, at least: the bounds that
published decompositions of toys keep within."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SiteFound:
    """What the components of a site became; numbers of every seed."""

    site: Site
    counts: FiringCounts
    probed: Tensor | None = None
    """Importances of each feature alone (seeds, features, C); None for a language model."""
    errors: Tensor | None = None
    """Entries of those that are wrong (seeds,)."""
    matched: Matched | None = None
    """Beside the columns or rows of the weight, where each is a feature."""

    @property
    def alive(self) -> Tensor:
        """Components in use anywhere (seeds,)."""
        return self.counts.alive().sum(1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What became of a decomposition; numbers of every seed."""

    sites: tuple[SiteFound, ...]
    unmasked: Tensor
    """How far the sums of components are from the target (seeds,)."""
    stochastic: Tensor
    """The same under masks drawn at random."""
    faithfulness: Tensor
    by_name: Mapping[str, SiteFound] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {each.site.name: each for each in self.sites})

    @property
    def errors(self) -> Tensor | None:
        """Wrong importances of all sites whose truth is known (seeds,)."""
        known = [each.errors for each in self.sites if each.errors is not None]
        return torch.stack(known).sum(0) if known else None

    @property
    def right(self) -> Tensor | None:
        """Whether the components of each seed are those of the truth (seeds,)."""
        if (errors := self.errors) is None:
            return None
        right = errors == 0
        for matched in (each.matched for each in self.sites if each.matched is not None):
            low, high = RIGHT_NORMS
            ratio = matched.norm_ratio.mean(1)
            near = (matched.cosine.amin(1) >= RIGHT_COSINE) & (ratio >= low) & (ratio <= high)
            right = right & near.to(right.device)
        return right


@torch.no_grad()
def judge(
    model: DecompositionModel,
    subject: ToySubject | LanguageSubject,
    settings: JudgeSection,
    *,
    batch_size: int,
    seed: int,
) -> Found:
    """Look at batches that are the same each time, and at what is known; waits for the device."""
    torch.manual_seed(seed)
    sites = model.decomposition.sites
    weight = model.decomposition.module(sites[0]).weight
    counts = [
        FiringCounts(model.seeds, site.components, threshold=settings.alive, device=weight.device)
        for site in sites
    ]
    compared = {kind: build_loss(kind, {"coefficient": 1.0}) for kind in ("unmasked", "stochastic")}
    sums = dict.fromkeys(compared, torch.zeros(model.seeds, device=weight.device))
    for number in range(settings.batches):
        step = model(subject.judged_on(number, batch_size))
        for count, importance in zip(counts, step.lower, strict=True):
            count.add(importance)
        sums = {kind: sums[kind] + loss(step) for kind, loss in compared.items()}
    probed = _probed(model, subject)
    return Found(
        sites=tuple(
            _site_found(model, subject, site, count, probed.get(site.name), settings)
            for site, count in zip(sites, counts, strict=True)
        ),
        unmasked=sums["unmasked"] / settings.batches,
        stochastic=sums["stochastic"] / settings.batches,
        faithfulness=unfaithfulness(model.decomposition),
    )


def _probed(
    model: DecompositionModel, subject: ToySubject | LanguageSubject
) -> Mapping[str, Tensor]:
    """Return the importances that each site has for each feature alone."""
    if isinstance(subject, LanguageSubject) or subject.toy.probe is None:
        return {}
    importances = model(subject.toy.probe).lower
    return {
        site.name: each for site, each in zip(model.decomposition.sites, importances, strict=True)
    }


def _site_found(
    model: DecompositionModel,
    subject: ToySubject | LanguageSubject,
    site: Site,
    counts: FiringCounts,
    probed: Tensor | None,
    settings: JudgeSection,
) -> SiteFound:
    truth = None if isinstance(subject, LanguageSubject) else subject.truth.get(site.name)
    if truth is None or probed is None:
        return SiteFound(site=site, counts=counts, probed=probed)
    errors = importance_error(probed, truth, tolerance=settings.tolerance)
    matched = None
    features = probed.shape[1]
    if truth.kind == "identity" and features in (site.d_in, site.d_out):
        components = model.decomposition.components[site.name]
        weight = model.decomposition.module(site).weight_t.mT
        matched = match_features(
            components.V,
            components.U,
            weight,
            along="inputs" if site.d_in == features else "outputs",
            alive=counts.alive(),
        )
    return SiteFound(site=site, counts=counts, probed=probed, errors=errors, matched=matched)
