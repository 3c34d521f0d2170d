"""Channels clipped to their own percentiles, so that a few loud rows cannot decide the components.

Whitening is second order: a row that is 1,000 times as loud as the others has a million times their
weight in the covariance, whatever the contrast does afterwards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from typing import Self, final

import torch
from torch import Tensor

from narrowcast.workloads.sft.ica.dtypes import working_dtype
from narrowcast.workloads.sft.ica.signals import Signals
from narrowcast.workloads.sft.ica.statistics import check_finite


@final
@dataclass(frozen=True, kw_only=True)
class ClippedSignals:
    """Signals of a source, each channel limited to a range of its own."""

    source: Signals
    low: Tensor
    """(channels)."""
    high: Tensor
    """(channels)."""

    @classmethod
    def at_percentile(cls, source: Signals, percentile: float) -> Self:
        """Clip each channel to between its percentiles `100 - percentile` and `percentile`.

        Exact, with linear interpolation as numpy has it, in two passes over the source.
        """
        rows = sum(map(len, source))
        position = (rows - 1) * percentile / 100
        count = rows - floor(position)
        extremes: Tensor | None = None  # (2, channels, count): the largest of x, and of -x
        first_row = 0
        for chunk in source:
            values = chunk.T.to(working_dtype(chunk.dtype))
            both = torch.stack([values, -values])
            both = both if extremes is None else torch.cat([extremes, both], -1)
            extremes = both.topk(min(count, both.shape[-1]), -1).values
            if not bool(extremes[..., 0].isfinite().all()):
                check_finite(chunk, first_row=first_row)
            first_row += len(chunk)
        if extremes is None:
            return cls(source=source, low=torch.empty(0), high=torch.empty(0))
        inner, outer = extremes[..., -1], extremes[..., max(-2, -extremes.shape[-1])]
        high, low = torch.lerp(inner, outer, position - floor(position))
        return cls(source=source, low=-low, high=high)

    @property
    def channels(self) -> int:
        """Those of the source."""
        return self.source.channels

    def __iter__(self) -> Iterator[Tensor]:
        for chunk in self.source:
            yield chunk.clamp(self.low.to(chunk), self.high.to(chunk))
