"""Counts over samples of the same format, also of a format that a module may return to."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from narrowcast.health.findings.rules import EIGHT_BITS, SATURATED, VANISHED
from narrowcast.health.statistics.statistics import COLUMNS, statistics
from narrowcast.kernels.launch import upload
from narrowcast.numerics import FP16, BlockFormat, Format, format_named
from narrowcast.precision.plan.module_plan import GRADIENTS, OPERANDS, roundings
from narrowcast.precision.plan.policy import Policy


@dataclass(frozen=True, eq=False)
class TensorSite:
    """One sampled tensor of a model: its module, the format it is rounded to, and the sample."""

    module: str
    role: str
    format: str
    scaling: str
    sample: Tensor
    """All zeros until something has passed."""


def make_site(module: str, role: str, policy: Policy, *, sample: Tensor) -> TensorSite:
    """Return the site of a role of a module that has a policy."""
    rounded_to = roundings(policy, role)[-1]  # what that one loses is lost to the product
    scaling = policy.scaling if role in OPERANDS else "none"
    return TensorSite(module=module, role=role, format=rounded_to, scaling=scaling, sample=sample)


class Counting(Protocol):
    """Makes a row of numbers of each sample."""

    def __call__(self, samples: Tensor, target: Format, *, scaling: str) -> Tensor: ...


@final
class Grouping:
    """The samples of some tensors, by what they are rounded to."""

    def __init__(self, sites: Sequence[TensorSite]) -> None:
        groups: defaultdict[_Kind, list[int]] = defaultdict(list)
        for i, site in enumerate(sites):
            groups[_kind(site)].append(i)
        self._groups = {k: [sites[i].sample for i in members] for k, members in groups.items()}
        order = torch.tensor([i for members in groups.values() for i in members])
        self._back = upload(order.argsort(), sites[0].sample.device) if sites else order

    def stacks(self) -> list[Tensor]:
        """Return copies of the current samples, grouped by format."""
        return [torch.stack(samples) for samples in self._groups.values()]

    def rows(self, stacks: Sequence[Tensor], count: Counting) -> Tensor:
        """Return a row of numbers for each tensor, in their order. Waits for nothing."""
        both = zip(self._groups, stacks, strict=True)
        return self.in_order([count(s, kind.target, scaling=kind.scaling) for kind, s in both])

    def in_order(self, stacks: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(stacks)).index_select(0, self._back) if stacks else torch.empty(0, 0)


@dataclass(frozen=True)
class _Kind:
    """What decides how a tensor is rounded."""

    target: Format
    scaling: str


def _kind(site: TensorSite) -> _Kind:
    target = format_named(site.format)
    if isinstance(target, BlockFormat):
        return _Kind(target.element, "block")
    return _Kind(target, site.scaling if target.bits <= 8 else "none")


ROOM = 2.0
"""What must be left to each limit: a sample misses the largest, and values move."""


@final
class WhatIf:
    """The samples of some sites, as if their modules had other policies."""

    def __init__(self, sites: Sequence[TensorSite], policies: Mapping[str, Policy]) -> None:
        self.sites = [
            make_site(site.module, site.role, policies[site.module], sample=site.sample)
            for site in sites
            if site.module in policies and site.role != "update"
        ]
        self._grouping = Grouping(self.sites)

    def rows(self) -> Tensor:
        """Return what is lost, a row for each site. Waits for nothing."""
        return self._grouping.rows(self._grouping.stacks(), statistics)


def unsafe_to_lower(
    sites: Sequence[TensorSite], rows: Sequence[Sequence[float]], *, scaled: bool
) -> Iterator[str]:
    """Yield the modules whose sites would not hold the seen values, each once."""
    message = set()
    for site, row in zip(sites, rows, strict=True):
        if site.module not in message and not _fits(site, row, scaled=scaled):
            message.add(site.module)
            yield site.module


def _fits(site: TensorSite, row: Sequence[float], *, scaled: bool) -> bool:
    lost = dict(zip(COLUMNS, row, strict=True))
    gradient = site.role in GRADIENTS
    if gradient and ROOM * lost["underflow"] > VANISHED:
        return False
    if site.format in EIGHT_BITS:
        return ROOM * lost["overflow"] <= SATURATED
    if site.format == FP16.name and not (gradient and scaled):
        return ROOM * lost["amax"] < FP16.overflow
    return True
