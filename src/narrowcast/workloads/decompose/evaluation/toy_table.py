"""A toy's decomposition compared with its known components, per seed.

The nearest component's cosine proves little: twenty random directions cover a plane. So a column is
compared with the largest of its living components, and norms are compared as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.targets.toy import Truth

Along = Literal["inputs", "outputs"]
"""Where features are: in the columns of a weight, or in its rows."""
ALIVE = 0.1
"""A component is alive that is more important than this to any feature by itself."""


@final
@dataclass(frozen=True, kw_only=True)
class Matched:
    """Each feature of a weight, and the largest component alive there; all (seeds, features)."""

    cosine: Tensor
    norm_ratio: Tensor
    """Norm of the component by that of the weight; 0 where nothing is alive."""
    component: Tensor
    """Its number; -1 where nothing is alive."""


@final
@dataclass(frozen=True, kw_only=True)
class SiteTable:
    """What was found at a site; all (seeds,), on the CPU."""

    errors: Tensor
    """Wrong entries of the importances."""
    alive: Tensor
    """Components that any feature needs."""
    least_cosine: Tensor | None = None
    """Least cosine of a feature and its largest living component; None without columns or rows."""
    norm_ratio: Tensor | None = None
    """The mean over features of that component's norm by the weight's."""
    matched: Matched | None = None
    """Which component each feature was compared with, and how alike they are."""


@torch.no_grad()
def toy_table(
    decomposition: Decomposition,
    importance: Sequence[Tensor],
    truth: Mapping[str, Truth],
    *,
    tolerance: float = 0.1,
) -> dict[str, SiteTable]:
    """Return the table of each site with known components; synchronises."""
    return {
        site.name: _table(decomposition, index, importance[index], truth[site.name], tolerance)
        for index, site in enumerate(decomposition.sites)
        if site.name in truth
    }


def _table(
    decomposition: Decomposition,
    index: int,
    importance: Tensor,
    truth: Truth,
    tolerance: float,
) -> SiteTable:
    errors = importance_error(importance, truth, tolerance=tolerance)
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
        matched=matched,
    )


def importance_error(importance: Tensor, truth: Truth, *, tolerance: float = 0.1) -> Tensor:
    """Return how many importances of single features are wrong, per seed; synchronises."""
    if truth.kind == "identity":
        return identity_error(importance, tolerance=tolerance)
    return dense_error(importance, truth.size, tolerance=tolerance)


def identity_error(importance: Tensor, *, tolerance: float) -> Tensor:
    """Count features whose component is below 1, and other components above 0."""
    importance = importance.detach().float().cpu()
    on_diagonal = torch.zeros_like(importance, dtype=torch.bool)
    for seed, columns in enumerate(matched_component(importance)):
        inputs = columns >= 0
        on_diagonal[seed, inputs.nonzero().flatten(), columns[inputs]] = True
    result = (on_diagonal & (importance >= 1 - tolerance)).sum((1, 2))
    # Not a number is neither below nor above: it counts as wrong.
    others = (~on_diagonal & ~(importance <= tolerance)).sum((1, 2))
    return importance.shape[1] - result + others


def dense_error(importance: Tensor, components: int, *, tolerance: float) -> Tensor:
    """Count heaviest columns that never reach 1, and entries of the others above 0."""
    importance = importance.detach().float().cpu()
    order = importance.nan_to_num().sum(dim=1).argsort(dim=1, descending=True)
    sorted_ = importance.gather(2, order[:, None].expand_as(importance))
    used, others = sorted_[:, :, :components], sorted_[:, :, components:]
    matched = (used >= 1 - tolerance).any(dim=1).sum(dim=1)
    return components - matched + (~(others <= tolerance)).sum((1, 2))


def matched_component(importance: Tensor) -> Tensor:
    """Return the component of each feature by the best assignment, or -1, per seed."""
    matrices = importance.detach().float().nan_to_num().cpu().double().numpy()
    return torch.stack([torch.from_numpy(best_assignment(matrix)) for matrix in matrices])


def best_assignment(worth: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column of each row that maximises the sum of worths, or -1 for rows left over."""
    rows, columns = worth.shape
    if rows > columns:
        # Columns are given out among rows instead.
        matched_rows = best_assignment(np.ascontiguousarray(worth.T))
        matched_columns = np.full(rows, -1)
        matched_columns[matched_rows] = np.arange(columns)
        return matched_columns
    cost = -worth
    row_price, column_price = np.zeros(rows), np.zeros(columns + 1)
    # The column after the last is where a path begins; it holds the row that is being placed.
    row_at = np.full(columns + 1, -1)
    for row in range(rows):
        row_at[columns] = row
        here = columns
        distance, came_from = np.full(columns, np.inf), np.full(columns, columns)
        seen = np.zeros(columns + 1, dtype=bool)
        while row_at[here] != -1:
            seen[here] = True
            at = row_at[here]
            reduced = cost[at] - row_price[at] - column_price[:columns]
            nearer = ~seen[:columns] & (reduced < distance)
            distance[nearer], came_from[nearer] = reduced[nearer], here
            open_distance = np.where(seen[:columns], np.inf, distance)
            here = int(open_distance.argmin())
            step = open_distance[here]
            row_price[row_at[seen]] += step
            column_price[seen] -= step
            distance[~seen[:columns]] -= step
        while here != columns:
            before = came_from[here]
            row_at[here], here = row_at[before], before
    matched_columns = np.empty(rows, dtype=np.int64)
    placed = np.flatnonzero(row_at[:columns] != -1)
    matched_columns[row_at[placed]] = placed
    return matched_columns


def match_features(
    v: Tensor, u: Tensor, weight: Tensor, *, along: Along, alive: Tensor | None = None
) -> Matched:
    """Compare V (seeds, d_in, C) and U (seeds, C, d_out) with a weight (seeds, d_out, d_in)."""
    share, direction, columns = _oriented(v, u, weight, along)
    norms = share.abs() * direction.norm(dim=2)[:, None]  # (seeds, features, C)
    if alive is not None:
        norms = norms.masked_fill(~alive[:, None], -1)
    largest, component = norms.max(dim=2)
    none = largest < 0
    cosine = _cosines(share, direction, columns).gather(2, component[..., None]).squeeze(2)
    ratio = largest / columns.norm(dim=2)
    return Matched(
        cosine=cosine.masked_fill(none, 0),
        norm_ratio=ratio.masked_fill(none, 0),
        component=component.masked_fill(none, -1),
    )


def _oriented(v: Tensor, u: Tensor, weight: Tensor, along: Along) -> tuple[Tensor, Tensor, Tensor]:
    """Return per feature: its share of components, their directions, and its weight."""
    v, u, weight = v.detach().float(), u.detach().float(), weight.detach().float()
    return (v, u, weight.mT) if along == "inputs" else (u.mT, v.mT, weight)


def _cosines(share: Tensor, direction: Tensor, columns: Tensor) -> Tensor:
    unsigned = torch.bmm(unit(columns), unit(direction).mT)
    return unsigned * share.sign()


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of norm 1."""
    # A vector of zeros stays one: it is like nothing.
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return unit
