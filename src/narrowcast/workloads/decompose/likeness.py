"""How alike the components of two runs are, site by site."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.evaluation.matching import Components, compare_runs

ALIKE = 0.9
"""A component was found again in the other run where its best cosine is above."""


def likeness(
    first: Mapping[str, Components], second: Mapping[str, Components]
) -> list[dict[str, Any]]:
    """Return a row for each site that both have: alive, MMCS and how many are alike, of each."""
    shared = [name for name in first if name in second]
    if not shared:
        raise ConfigError(
            f"The runs have no site in common: {', '.join(first)}; and {', '.join(second)}. "
            "Compare decompositions of the same target."
        )
    rows = []
    for name in shared:
        one, other = first[name], second[name]
        if (one.v.shape[0], one.u.shape[1]) != (other.v.shape[0], other.u.shape[1]):
            raise ConfigError(
                f"{name} is {one.v.shape[0]} x {one.u.shape[1]} in one run and {other.v.shape[0]} "
                f"x {other.u.shape[1]} in the other. Compare decompositions of the same target."
            )
        if one.target != other.target:
            raise ConfigError(
                f"{name} has different weights in the two targets, so its components are not "
                "comparable. Compare decompositions of the same target; each seed of a toy trains "
                "its own target."
            )
        best = compare_runs(one, other)
        rows.append(
            {
                "site": name,
                "alive": [len(each) for each in best],
                "mmcs": [_mean(each) for each in best],
                "found": [int((each > ALIKE).sum()) for each in best],
            }
        )
    return rows


def _mean(cosines: Tensor) -> float:
    return float(cosines.double().mean()) if len(cosines) else 0.0
