"""Samples of the same format, counted together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from narrowcast.health.statistics.sites import TensorSite
from narrowcast.kernels.tables import upload
from narrowcast.numerics import BlockFormat, Format, format_named


class Counting(Protocol):
    """Makes a row of numbers of each sample."""

    def __call__(self, samples: Tensor, target: Format, *, scaling: str) -> Tensor:
        """Return a row for each row."""
        ...


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
        """Return copies of the samples of now, those of a format together."""
        return [torch.stack(samples) for samples in self._groups.values()]

    def rows(self, stacks: Sequence[Tensor], count: Counting) -> Tensor:
        """Return a row of numbers for each tensor, in their order. Waits for nothing."""
        both = zip(self._groups, stacks, strict=True)
        return self.in_order([count(s, kind.target, scaling=kind.scaling) for kind, s in both])

    def in_order(self, stacks: Sequence[Tensor]) -> Tensor:
        """Return the rows of all groups in the order of the tensors."""
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
