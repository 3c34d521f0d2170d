"""What a finished decomposition leaves in its run folder for the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.workloads.decompose.build import Parts
from narrowcast.workloads.decompose.evaluation.language_table import MASKINGS
from narrowcast.workloads.decompose.judging import DecompositionResult, SiteResult
from narrowcast.workloads.decompose.report.matrices import (
    component_picture,
    histogram,
    importance_picture,
)
from narrowcast.workloads.decompose.report.schema import (
    MOST_COMPARED,
    MOST_DRAWN,
    Component,
    Decomposition,
    MaskedLoss,
    SeedResult,
    Site,
    write,
)
from narrowcast.workloads.decompose.settings import EvalTasksSection
from narrowcast.workloads.decompose.targets.language import Language

PROBE = "each feature alone, at 0.75"


def write_result(
    folder: Path, result: DecompositionResult, parts: Parts, recipe: Recipe, *, worst: float | None
) -> None:
    """Write `decomposition.json` with pictures of the first seed."""
    settings = recipe.section(EvalTasksSection)
    is_language = isinstance(parts.subject, Language)
    written = Decomposition(
        target=parts.subject.name,
        seeds=tuple(range(parts.model.seeds)),
        drawn_seed=0,
        alive_threshold=settings.alive,
        probe="" if is_language else PROBE,
        sites=tuple(
            _site(each, parts, drawn=number < MOST_COMPARED)
            for number, each in enumerate(result.sites)
        ),
        verdicts=tuple(_verdicts(result)),
        language=tuple(_language(result.language)),
        pgd=((settings.pgd_steps, worst),) if worst is not None else (),
    )
    write(folder, written)


def _site(each: SiteResult, parts: Parts, *, drawn: bool) -> Site:
    subject, site, table = parts.subject, each.site, each.table
    matched = None if table is None else table.matched
    truth = None if isinstance(subject, Language) else subject.truth.get(site.name)
    importance, order = None, list[int]()
    if each.probed is not None:
        dense = truth is not None and truth.kind == "dense"
        importance, order = importance_picture(each.probed[0], dense=dense)
    return Site(
        name=site.name,
        kind=site.kind,
        inputs=site.d_in,
        outputs=site.d_out,
        components=site.components,
        expected=None if truth is None else truth.size,
        shape="" if truth is None else truth.kind,
        alive=tuple(int(count) for count in each.alive.tolist()),
        l0=_numbers(each.counts.l0),
        identity_error=() if table is None else tuple(int(n) for n in table.errors.tolist()),
        cosine=() if matched is None else _numbers(matched.cosine.amin(1)),
        mean_cosine=() if matched is None else _numbers(matched.cosine.mean(1)),
        norm_ratio=() if matched is None else _numbers(matched.norm_ratio.mean(1)),
        importance=importance,
        importance_order=tuple(order),
        largest=tuple(_largest(each, parts)) if drawn else (),
        densities=histogram(each.counts.density[0]),
    )


def _largest(each: SiteResult, parts: Parts) -> Iterable[Component]:
    """Draw the alive components with the largest norms, and the features they match."""
    components = parts.model.decomposition.components[each.site.name]
    read, written = components.V[0].detach().float(), components.U[0].detach().float()
    norms = read.norm(dim=0) * written.norm(dim=1)
    alive = each.living[0].to(norms.device)
    order = norms.masked_fill(~alive, -1.0).argsort(descending=True)[: int(alive.sum())]
    weight = parts.model.decomposition.module(each.site).weight_t[0].mT
    matched = None if each.table is None else each.table.matched
    features = {} if matched is None else _features(matched.component[0])
    density = each.counts.density[0]
    for number in order[:MOST_DRAWN].tolist():
        feature = features.get(number)
        alike: dict[str, float | None] = {}
        if matched is not None and feature is not None:
            alike["cosine"] = _number(matched.cosine[0, feature].item())
            alike["norm_ratio"] = _number(matched.norm_ratio[0, feature].item())
        own = None if feature is None else _only(weight, feature, each)
        yield Component(
            number=number,
            learned=component_picture(torch.outer(written[number], read[:, number])),
            truth=None if own is None else component_picture(own),
            name="" if feature is None else f"feature {feature}",
            density=_number(density[number].item()),
            **alike,
        )


def _features(component: Tensor) -> dict[int, int]:
    """Return the feature of each component."""
    return {each: at for at, each in enumerate(component.tolist()) if each >= 0}


def _only(weight: Tensor, feature: int, each: SiteResult) -> Tensor:
    """Return the part of a weight (outputs, inputs) that belongs to one feature."""
    assert each.probed is not None
    part = torch.zeros_like(weight)
    if each.site.d_in == each.probed.shape[1]:
        part[:, feature] = weight[:, feature]
    else:
        part[feature] = weight[feature]
    return part


def _language(info: Mapping[str, float]) -> Iterable[MaskedLoss]:
    """Return the published table."""
    if not info:
        return
    yield MaskedLoss(mask="target", cross_entropy=_number(info["ce_target"]), kl=0.0)
    for masking in MASKINGS:
        yield MaskedLoss(
            mask=masking,
            cross_entropy=_number(info[f"ce_{masking}"]),
            kl=_number(info[f"kl_{masking}"]),
            ce_difference=_number(info[f"ce_difference_{masking}"]),
            ce_unrecovered=_number(info[f"ce_unrecovered_{masking}"]),
        )


def _verdicts(result: DecompositionResult) -> Iterable[SeedResult]:
    right = result.right
    for seed in range(len(result.faithfulness)):
        counts = ", ".join(f"{each.site.name} {int(each.alive[seed])}" for each in result.sites[:8])
        said = f"alive components: {counts}"
        if right is None:
            yield SeedResult(seed=seed, said=said)
            continue
        judged = "matches the ground truth"
        if faults := result.faults(seed):
            judged = f"does not match the ground truth: {'; '.join(faults)}"
        yield SeedResult(seed=seed, right=bool(right[seed]), said=f"{judged}; {said}")


def _numbers(each: Tensor) -> tuple[float | None, ...]:
    numbers: Sequence[float] = each.double().tolist()
    return tuple(_number(number) for number in numbers)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
