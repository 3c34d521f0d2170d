"""How good a decomposition is: how few components it uses, and whether they are the right ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.runs import Metric
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.evaluation.language_table import LanguageTable
from narrowcast.workloads.decompose.evaluation.toy_table import ALIVE, SiteTable, toy_table
from narrowcast.workloads.decompose.losses.adversary import PGD, initial, rising, split, stepped
from narrowcast.workloads.decompose.losses.penalties import unfaithfulness
from narrowcast.workloads.decompose.losses.reconstruction import Stochastic, Unmasked
from narrowcast.workloads.decompose.losses.terms import Step
from narrowcast.workloads.decompose.model import DecompositionModel
from narrowcast.workloads.decompose.settings import EvalTasksSection
from narrowcast.workloads.decompose.targets.language import Language
from narrowcast.workloads.decompose.targets.toy import Toy

RIGHT_COSINE, RIGHT_NORMS = 0.99, (0.95, 1.06)
"""Least cosine and range of norms of a right component, as in published decompositions of toys."""
TOLD = ("stochastic", "ci", "rounded", "unmasked")
"""Masks of a language model in an evaluation; the report has them all."""
MOST_SITES = 8
"""Sites with metrics of their own; more are reported together and by group."""


@final
class FiringCounts:
    """What the importances of a site were, over all positions that were looked at."""

    def __init__(
        self, seeds: int, components: int, *, threshold: float, device: torch.device | str
    ) -> None:
        self.threshold = threshold
        self.positions = 0
        # In float64: float32 stops to count at 16 million.
        self._fired = torch.zeros(seeds, components, dtype=torch.float64, device=device)

    def add(self, importance: Tensor) -> None:
        """Count (seeds, positions, components)."""
        importance = importance.detach()
        self.positions += importance.shape[1]
        self._fired += (importance > self.threshold).sum(dim=1)

    @property
    def density(self) -> Tensor:
        """The share of positions at which each component is above the threshold (seeds, C)."""
        return self._fired / max(self.positions, 1)

    @property
    def l0(self) -> Tensor:
        """The mean number of components above the threshold at a position (seeds,)."""
        return self.density.sum(dim=1)

    @property
    def alive(self) -> Tensor:
        """Which components were above the threshold at any position (seeds, C)."""
        return self._fired > 0


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
        """Which components are alive (seeds, C): for any feature alone, or else at any position."""
        if self.table is None or self.probed is None:
            return self.counts.alive
        return (self.probed > ALIVE).any(dim=1)

    @property
    def alive(self) -> Tensor:
        """How many components are alive (seeds,)."""
        return self.living.sum(1).cpu()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DecompositionResult:
    """What became of a decomposition; numbers of every seed."""

    sites: tuple[SiteResult, ...]
    divergences: Mapping[str, Tensor]
    """Distance from the target (seeds,), `unmasked` and `stochastic`; empty for language models."""
    faithfulness: Tensor
    tolerance: float
    """How far importances may be from 0 or 1."""
    language: Mapping[str, float]
    """What a masked language model loses (`LanguageTable`); nothing for a toy."""

    @property
    def errors(self) -> Tensor | None:
        """Wrong importances of all sites with a known truth (seeds,)."""
        known = [each.table for each in self.sites if each.table is not None]
        return torch.stack([each.errors for each in known]).sum(0) if known else None

    @property
    def right(self) -> Tensor | None:
        """Whether the components of each seed match the truth (seeds,)."""
        if (errors := self.errors) is None:
            return None
        return torch.tensor([not self.faults(seed) for seed in range(len(errors))])

    def faults(self, seed: int) -> list[str]:
        """Return how the components of a seed differ from the truth, site by site."""
        low, high = RIGHT_NORMS
        faults = []
        for each in self.sites:
            if (table := each.table) is None:
                continue
            if wrong := int(table.errors[seed]):
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
    model: DecompositionModel, subject: Toy | Language, recipe: Recipe
) -> DecompositionResult:
    """Evaluate on the same batches each time, and against what is known; synchronises."""
    torch.manual_seed(recipe.seed)
    settings = recipe.section(EvalTasksSection)
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
        x = subject.judged_on(number, recipe.batch_size)
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
def worst_masks(model: DecompositionModel, subject: Toy | Language, recipe: Recipe) -> float | None:
    """Return the divergence under adversarial masks, a mean over seeds; synchronises."""
    settings = recipe.section(EvalTasksSection)
    if not settings.pgd_steps:
        return None
    torch.manual_seed(recipe.seed)
    steps = [
        model(subject.judged_on(number, recipe.batch_size)) for number in range(settings.batches)
    ]
    result = quality_bar(steps, ascents=settings.pgd_steps, step_size=settings.pgd_step_size)
    return float(result.double().mean().item())


def _known(
    model: DecompositionModel, subject: Toy | Language, settings: EvalTasksSection
) -> tuple[Mapping[str, Tensor], Mapping[str, SiteTable]]:
    """Return the importances of each feature alone, and their tables."""
    if isinstance(subject, Language) or subject.probe is None:
        return {}, {}
    decomposition = model.decomposition
    importances = model(subject.probe).lower
    tables = toy_table(decomposition, importances, subject.truth, tolerance=settings.tolerance)
    names = [site.name for site in decomposition.sites]
    return dict(zip(names, importances, strict=True)), tables


@torch.no_grad()
def quality_bar(steps: Sequence[Step], *, ascents: int = 20, step_size: float = 0.1) -> Tensor:
    """Return the divergence under one adversarial source for all positions, per seed."""
    held = [step.hold() for step in steps]
    term = PGD(coefficient=1.0, step_size=step_size)
    (route,) = term.routes(held[0])
    rows = sum(step.rows for step in held)

    def divergence(values: Sequence[Tensor], step: Step) -> Tensor:
        return term.divergence(step, route, *split(values, step)) * (step.rows / rows)

    values = initial("random", held[0], 1)
    for _ in range(ascents):
        slopes = [torch.zeros_like(value) for value in values]
        for step in held:
            with torch.enable_grad():
                moving = [value.requires_grad_() for value in values]
                matches = rising(divergence(moving, step), moving)
            slopes = [slope + each for slope, each in zip(slopes, matches, strict=True)]
        values = stepped(values, slopes, step_size)
    return torch.stack([divergence(values, step) for step in held]).sum(dim=0)


def task_metrics(
    subject: Toy | Language, sites: Sequence[Site], groups: Sequence[str]
) -> tuple[Metric, ...]:
    """Return the metrics of evaluations, the headline first."""
    known = [] if isinstance(subject, Language) else [*subject.truth]
    lines: list[Metric] = []
    if known:
        lines.append(Metric(name="identity_error", text=",.6g"))
        lines.append(Metric(name="right", better="higher", text=".0%"))
    if isinstance(subject, Language):
        lines += [Metric(name=f"kl/{each}") for each in TOLD]
        lines += [Metric(name=f"ce/{each}") for each in ("target", *TOLD)]
        lines.append(Metric(name="faithfulness"))
    else:
        lines += [Metric(name="stochastic"), Metric(name="unmasked"), Metric(name="faithfulness")]
    # With too few components in use a decomposition is wrong, with too many it is not minimal.
    lines += [Metric(name=name, ranked=False) for name in _counted(sites, groups)]
    return tuple(lines)


def mean_measures(result: DecompositionResult, groups: Sequence[str]) -> dict[str, float]:
    """Return the metrics, as means over seeds; synchronises."""
    info: dict[str, float] = {}
    if result.errors is not None and result.right is not None:
        info |= {"identity_error": _mean(result.errors), "right": _mean(result.right)}
    if table := result.language:
        info |= {f"kl/{each}": table[f"kl_{each}"] for each in TOLD}
        info |= {f"ce/{each}": table[f"ce_{each}"] for each in ("target", *TOLD)}
    else:
        info |= {kind: _mean(result.divergences[kind]) for kind in ("stochastic", "unmasked")}
    info["faithfulness"] = _mean(result.faithfulness)
    sites = [each.site for each in result.sites]
    l0 = {each.site.name: _mean(each.counts.l0) for each in result.sites}
    alive = {each.site.name: _mean(each.alive) for each in result.sites}
    for name, members in _groups(sites, groups).items():
        info[f"l0{name}"] = sum(l0[each] for each in members)
        info[f"alive{name}"] = sum(alive[each] for each in members)
    return info


def _counted(sites: Sequence[Site], groups: Sequence[str]) -> Iterator[str]:
    for name in _groups(sites, groups):
        yield f"l0{name}"
        yield f"alive{name}"


def _groups(sites: Sequence[Site], globs: Sequence[str]) -> Mapping[str, list[str]]:
    """Return which sites are summed, by the suffix of a metric's name."""
    names = [site.name for site in sites]
    message = {"": names}
    if len(names) <= MOST_SITES:
        message |= {f"/{name}": [name] for name in names}
    for glob in globs:
        members = [name for name in names if fnmatchcase(name, glob)]
        if not members:
            raise ConfigError(
                f"eval_tasks.groups must match sites ({', '.join(names)}), got {glob!r}."
            )
        message[f"/{glob}"] = members
    return message


def _mean(numbers: Tensor) -> float:
    return float(numbers.double().mean().item())
