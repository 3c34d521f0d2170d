"""What an evaluation tells of a decomposition, number by number, as means over seeds."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from narrowcast.errors import RecipeError
from narrowcast.runs import Metric
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.judging import Found
from narrowcast.workloads.decompose.subject import LanguageSubject, ToySubject

TOLD = ("stochastic", "ci", "rounded", "unmasked")
"""Masks of a language model that an evaluation tells of; the report has them all."""
MOST_SITES = 8
"""Sites that are told of one by one in an evaluation; of more, all together and by group."""


def metrics_of(
    subject: ToySubject | LanguageSubject, sites: Sequence[Site], groups: Sequence[str]
) -> tuple[Metric, ...]:
    """Return what evaluations tell, the headline first."""
    known = [] if isinstance(subject, LanguageSubject) else [*subject.truth]
    told: list[Metric] = []
    if known:
        told.append(Metric(name="identity_error", text=",.6g"))
        told.append(Metric(name="right", better="higher", text=".0%"))
    if isinstance(subject, LanguageSubject):
        told += [Metric(name=f"kl/{each}") for each in TOLD]
        told += [Metric(name=f"ce/{each}") for each in ("target", *TOLD)]
        told.append(Metric(name="faithfulness"))
    else:
        told += [Metric(name="stochastic"), Metric(name="unmasked"), Metric(name="faithfulness")]
    # With too few components in use a decomposition is wrong, with too many it is not minimal.
    told += [Metric(name=name, ranked=False) for name in _counted(sites, groups)]
    return tuple(told)


def measures_of(found: Found, groups: Sequence[str]) -> dict[str, float]:
    """Return the numbers, means over seeds; waits for the device."""
    told: dict[str, float] = {}
    if found.errors is not None and found.right is not None:
        told |= {"identity_error": _mean(found.errors), "right": _mean(found.right)}
    if table := found.language:
        told |= {f"kl/{each}": table[f"kl_{each}"] for each in TOLD}
        told |= {f"ce/{each}": table[f"ce_{each}"] for each in ("target", *TOLD)}
    else:
        told |= {kind: _mean(found.apart[kind]) for kind in ("stochastic", "unmasked")}
    told["faithfulness"] = _mean(found.faithfulness)
    sites = [each.site for each in found.sites]
    l0 = {each.site.name: _mean(each.counts.l0) for each in found.sites}
    alive = {each.site.name: _mean(each.alive) for each in found.sites}
    for name, members in _groups(sites, groups).items():
        told[f"l0{name}"] = sum(l0[each] for each in members)
        told[f"alive{name}"] = sum(alive[each] for each in members)
    return told


def _counted(sites: Sequence[Site], groups: Sequence[str]) -> Iterator[str]:
    for name in _groups(sites, groups):
        yield f"l0{name}"
        yield f"alive{name}"


def _groups(sites: Sequence[Site], globs: Sequence[str]) -> Mapping[str, list[str]]:
    """Return which sites are added up, by what stands behind the name of a measure."""
    names = [site.name for site in sites]
    told = {"": names}
    if len(names) <= MOST_SITES:
        told |= {f"/{name}": [name] for name in names}
    for glob in globs:
        members = [name for name in names if fnmatchcase(name, glob)]
        if not members:
            raise RecipeError(f"judge.groups: {glob!r} matches no site; sites: {', '.join(names)}")
        told[f"/{glob}"] = members
    return told


def _mean(numbers: Tensor) -> float:
    return float(numbers.double().mean().item())
