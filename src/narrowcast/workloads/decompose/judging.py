"""How good a decomposition is: how few components it uses, and whether they are the right ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.evaluation.language_table import LanguageTable
from narrowcast.workloads.decompose.evaluation.quality_bar import quality_bar
from narrowcast.workloads.decompose.evaluation.sparsity import FiringCounts
from narrowcast.workloads.decompose.evaluation.toy_table import ALIVE, SiteTable, toy_table
from narrowcast.workloads.decompose.losses.penalties import unfaithfulness
from narrowcast.workloads.decompose.losses.reconstruction import Stochastic, Unmasked
from narrowcast.workloads.decompose.model import DecompositionModel
from narrowcast.workloads.decompose.settings import EvalTasksSection
from narrowcast.workloads.decompose.targets.language import Language
from narrowcast.workloads.decompose.targets.toy import Toy

RIGHT_COSINE, RIGHT_NORMS = 0.99, (0.95, 1.06)
"""What a component has in common with the column it stands for, at least: the bounds that
published decompositions of toys keep within."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SiteResult:
    """What the components of a site became; numbers of every seed."""

    site: Site
    counts: FiringCounts
    probed: Tensor | None = None
    """Importances of each feature alone (seeds, features, C); None for a language model."""
    table: SiteTable | None = None
    """Beside what is known of it."""

    @property
    def living(self) -> Tensor:
        """Which components are in use (seeds, C): by any feature alone, or else at any position."""
        if self.table is None or self.probed is None:
            return self.counts.alive()
        return (self.probed > ALIVE).any(dim=1)

    @property
    def alive(self) -> Tensor:
        """How many these are (seeds,)."""
        return self.living.sum(1).cpu()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DecompositionResult:
    """What became of a decomposition; numbers of every seed."""

    sites: tuple[SiteResult, ...]
    divergences: Mapping[str, Tensor]
    """How far outputs are from the target's (seeds,): `unmasked`, the sums of components, and
    `stochastic`, under masks drawn at random; nothing for a language model, whose table has it."""
    faithfulness: Tensor
    tolerance: float
    """How far importances may be from 0 or 1."""
    language: Mapping[str, float]
    """What a masked language model loses (`LanguageTable`); nothing for a toy."""

    @property
    def errors(self) -> Tensor | None:
        """Wrong importances of all sites whose truth is known (seeds,)."""
        known = [each.table for each in self.sites if each.table is not None]
        return (
            torch.stack([each.errors[self.tolerance] for each in known]).sum(0) if known else None
        )

    @property
    def right(self) -> Tensor | None:
        """Whether the components of each seed are those of the truth (seeds,)."""
        if (errors := self.errors) is None:
            return None
        return torch.tensor([not self.faults(seed) for seed in range(len(errors))])

    def faults(self, seed: int) -> list[str]:
        """Return in what the components of a seed are not those of the truth, site by site."""
        low, high = RIGHT_NORMS
        faults = []
        for each in self.sites:
            if (table := each.table) is None:
                continue
            if wrong := int(table.errors[self.tolerance][seed]):
                faults.append(
                    f"{each.site.name} has {wrong} importance{'s' * (wrong != 1)} wrong by more "
                    f"than {self.tolerance:g}"
                )
            if table.least_cosine is None or table.norm_ratio is None:
                continue
            cosine, ratio = float(table.least_cosine[seed]), float(table.norm_ratio[seed])
            if not cosine >= RIGHT_COSINE:
                faults.append(
                    f"a component of {each.site.name} has cosine {cosine:.3f} with its feature, "
                    f"below {RIGHT_COSINE:g}"
                )
            if not low <= ratio <= high:
                faults.append(
                    f"the components of {each.site.name} have {ratio:.3f} times the norm of their "
                    f"features on average, outside {low:g} to {high:g}"
                )
        return faults


@torch.no_grad()
def judge(
    model: DecompositionModel,
    subject: Toy | Language,
    settings: EvalTasksSection,
    *,
    batch_size: int,
    seed: int,
) -> DecompositionResult:
    """Look at batches that are the same each time, and at what is known; waits for the device."""
    torch.manual_seed(seed)
    sites = model.decomposition.sites
    weight = model.decomposition.module(sites[0]).weight
    counts = [
        FiringCounts(model.seeds, site.components, threshold=settings.alive, device=weight.device)
        for site in sites
    ]
    table = LanguageTable(rounding=settings.rounding)
    is_language = isinstance(subject, Language)
    terms = [] if is_language else [Unmasked(coefficient=1.0), Stochastic(coefficient=1.0)]
    compared = {term.kind: term for term in terms}
    sums = dict.fromkeys(compared, torch.zeros(model.seeds, device=weight.device))
    for number in range(settings.batches):
        x = subject.judged_on(number, batch_size)
        step = model(x)
        if is_language:
            table.add(step, x)
        for count, importance in zip(counts, step.lower, strict=True):
            count.add(importance)
        sums = {kind: sums[kind] + loss(step) for kind, loss in compared.items()}
    probed, tables = _known(model, subject, settings)
    return DecompositionResult(
        sites=tuple(
            SiteResult(
                site=site,
                counts=count,
                probed=probed.get(site.name),
                table=tables.get(site.name),
            )
            for site, count in zip(sites, counts, strict=True)
        ),
        divergences={kind: each / settings.batches for kind, each in sums.items()},
        faithfulness=unfaithfulness(model.decomposition),
        tolerance=settings.tolerance,
        language=table.read() if is_language else {},
    )


@torch.no_grad()
def worst_masks(
    model: DecompositionModel,
    subject: Toy | Language,
    settings: EvalTasksSection,
    *,
    batch_size: int,
    seed: int,
) -> float | None:
    """Return how far outputs are under the worst masks found, a mean over seeds; waits."""
    if not settings.pgd_steps:
        return None
    torch.manual_seed(seed)
    steps = [model(subject.judged_on(number, batch_size)) for number in range(settings.batches)]
    result = quality_bar(steps, ascents=settings.pgd_steps, step_size=settings.pgd_step_size)
    return float(result.double().mean().item())


def _known(
    model: DecompositionModel, subject: Toy | Language, settings: EvalTasksSection
) -> tuple[Mapping[str, Tensor], Mapping[str, SiteTable]]:
    """Return the importances of each feature alone, and how they stand to what is known."""
    if isinstance(subject, Language) or subject.probe is None:
        return {}, {}
    decomposition = model.decomposition
    importances = model(subject.probe).lower
    tables = toy_table(decomposition, importances, subject.truth, tolerances=(settings.tolerance,))
    names = [site.name for site in decomposition.sites]
    return dict(zip(names, importances, strict=True)), tables
