"""How alike components are: to the weights they should be, or to those of another run.

The cosine of the component nearest to a column proves little by itself: twenty random directions
cover a plane, and one that is nearly dead can win by a hair. So a column is compared with the
largest of its components that are alive, and the norms are compared beside.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

Along = Literal["inputs", "outputs"]
"""Where features are: in the columns of a weight, or in its rows."""


@final
@dataclass(frozen=True, kw_only=True)
class Matched:
    """Each feature of a weight, and the largest component alive there; all (seeds, features)."""

    cosine: Tensor
    norm_ratio: Tensor
    """Norm of the component by that of the weight; 0 where nothing is alive."""
    component: Tensor
    """Its number; -1 where nothing is alive."""


def match_features(
    v: Tensor, u: Tensor, weight: Tensor, *, along: Along, alive: Tensor | None = None
) -> Matched:
    """Compare V (seeds, d_in, C) and U (seeds, C, d_out) with a weight (seeds, d_out, d_in).

    `alive` (seeds, C) says which components count; none: all.
    """
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


def mean_max_cosine(v: Tensor, u: Tensor, weight: Tensor, *, along: Along) -> Tensor:
    """Return for each seed the mean over features of the best cosine of any component.

    This is the MMCS that is published. For few dimensions it is high before anything is learnt.
    """
    return _cosines(*_oriented(v, u, weight, along)).amax(dim=2).mean(dim=1)


@final
@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a site in one run: V (d_in, C), U (C, d_out), and which are alive (C)."""

    v: Tensor
    u: Tensor
    alive: Tensor
    target: str = ""
    """Fingerprint of the matrix that they were taken from."""


def compare_runs(first: Components, second: Components) -> tuple[Tensor, Tensor]:
    """Return for each living component of either run its best cosine with one of the other.

    Of rank-one matrices, V_c U_c against V_d U_d. Where the other has nothing alive it is 0.
    """
    cosines = _unit(first.v.T) @ _unit(second.v.T).T * (_unit(first.u) @ _unit(second.u).T)
    cosines = cosines[first.alive][:, second.alive]
    if 0 in cosines.shape:
        return cosines.new_zeros(cosines.shape[0]), cosines.new_zeros(cosines.shape[1])
    return cosines.amax(dim=1), cosines.amax(dim=0)


def _oriented(v: Tensor, u: Tensor, weight: Tensor, along: Along) -> tuple[Tensor, Tensor, Tensor]:
    """Return how much of each component a feature has (seeds, features, C), its direction (seeds,
    C, d), and what the weight has of that feature (seeds, features, d)."""
    v, u, weight = v.detach().float(), u.detach().float(), weight.detach().float()
    return (v, u, weight.mT) if along == "inputs" else (u.mT, v.mT, weight)


def _cosines(share: Tensor, direction: Tensor, columns: Tensor) -> Tensor:
    unsigned = torch.bmm(_unit(columns), _unit(direction).mT)
    return unsigned * share.sign()


def _unit(vectors: Tensor) -> Tensor:
    # A vector of zeros stays one: it is like nothing.
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return unit
