"""What an evaluation tells of a decomposition, number by number, as means over seeds."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.runs import Metric
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.judging import DecompositionResult
from narrowcast.workloads.decompose.targets.language import Language
from narrowcast.workloads.decompose.targets.toy import Toy

TOLD = ("stochastic", "ci", "rounded", "unmasked")
"""Masks of a language model that an evaluation tells of; the report has them all."""
MOST_SITES = 8
"""Sites that are told of one by one in an evaluation; of more, all together and by group."""


def task_metrics(
    subject: Toy | Language, sites: Sequence[Site], groups: Sequence[str]
) -> tuple[Metric, ...]:
    """Return what evaluations tell, the headline first."""
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
    """Return the numbers, means over seeds; waits for the device."""
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
    """Return which sites are added up, by what stands behind the name of a measure."""
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
