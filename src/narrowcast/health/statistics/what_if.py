"""What raised modules would lose to the formats that the policy gives them.

A module that is calm in bf16 may be so only because it is bf16. Before it returns to its own
format, its samples are asked whether that would hold them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from torch import Tensor

from narrowcast.health.findings.rules import EIGHT_BITS, SATURATED, VANISHED
from narrowcast.health.statistics.grouping import Grouping
from narrowcast.health.statistics.sites import TensorSite, make_site
from narrowcast.health.statistics.statistics import COLUMNS, statistics
from narrowcast.numerics import FP16
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.roles import GRADIENTS

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
    """Yield the modules whose sites would not hold what was seen, each once.

    `scaled`: a loss scale gives way to gradients that are too large.
    """
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
