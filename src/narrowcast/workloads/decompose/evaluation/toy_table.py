"""A toy network's decomposition against all that is known of it, seed by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.evaluation.identity_error import TOLERANCES, importance_error
from narrowcast.workloads.decompose.evaluation.matching import (
    Matched,
    match_features,
    mean_max_cosine,
)
from narrowcast.workloads.decompose.targets.toy import Truth

ALIVE = 0.1
"""A component is alive that is more important than this to any feature by itself."""


@final
@dataclass(frozen=True, kw_only=True)
class SiteTable:
    """What was found at a site; all (seeds,), on the CPU."""

    errors: Mapping[float, Tensor]
    """Wrong entries of the importances, by tolerance."""
    alive: Tensor
    """Components that any feature needs."""
    least_cosine: Tensor | None = None
    """Of the feature whose largest living component is least like it; none where features are
    neither columns nor rows of the weight."""
    norm_ratio: Tensor | None = None
    """The mean over features of that component's norm by the weight's."""
    mean_max_cosine: Tensor | None = None
    """As it is published, of all components, dead ones too."""
    matched: Matched | None = None
    """Which component each feature was compared with, and how alike they are."""


@torch.no_grad()
def toy_table(
    decomposition: Decomposition,
    importance: Sequence[Tensor],
    truth: Mapping[str, Truth],
    *,
    tolerances: Sequence[float] = TOLERANCES,
) -> dict[str, SiteTable]:
    """Return the table of each site of which something is known; waits for the device.

    `importance` (seeds, features, components) of each site are the lower ones of the toy's probe.
    """
    return {
        site.name: _table(decomposition, index, importance[index], truth[site.name], tolerances)
        for index, site in enumerate(decomposition.sites)
        if site.name in truth
    }


def _table(
    decomposition: Decomposition,
    index: int,
    importance: Tensor,
    truth: Truth,
    tolerances: Sequence[float],
) -> SiteTable:
    errors = {each: importance_error(importance, truth, tolerance=each) for each in tolerances}
    alive = (importance > ALIVE).any(dim=1)
    count = alive.sum(dim=1).cpu()
    if truth.along is None:
        return SiteTable(errors=errors, alive=count)
    components = list(decomposition.components.values())[index]
    weight = decomposition.module(decomposition.sites[index]).weight_t.mT
    parts = components.V, components.U, weight.expand(decomposition.seeds, -1, -1)
    matched = match_features(*parts, along=truth.along, alive=alive)
    return SiteTable(
        errors=errors,
        alive=count,
        least_cosine=matched.cosine.amin(dim=1).cpu(),
        norm_ratio=matched.norm_ratio.mean(dim=1).cpu(),
        mean_max_cosine=mean_max_cosine(*parts, along=truth.along).cpu(),
        matched=matched,
    )
