"""A curve that grows for days and stays small: its steps fall into a bounded number of buckets.

When there are too many, each two neighbours become one. A bucket keeps what a reader would look
for, as `report/charts/series.py` does: its least value, its greatest, and that there was a gap.
"""

import math
from dataclasses import dataclass
from typing import Any, final

from narrowcast.report.charts.drawing import rounded

Row = list[float | None]
"""The mean of a bucket, then step and value of each point kept, in order; None is a gap."""


@final
class Curve:
    """Values over steps; `epoch` moves when buckets are joined."""

    def __init__(self, most: int) -> None:
        """Start empty; there are at most `most` buckets, an even number."""
        self.epoch = self.added = 0
        self._most, self._width = most, 1
        self._buckets: list[_Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, step: int, y: float | None) -> None:
        """Take the value of the next step; what is absent or not finite is a gap."""
        self.added += 1
        if y is not None and not math.isfinite(y):
            y = None
        if self._buckets and self._buckets[-1].first // self._width == step // self._width:
            self._buckets[-1].add(step, y)
            return
        self._buckets.append(_Bucket(first=step))
        self._buckets[-1].add(step, y)
        if len(self._buckets) > self._most:
            self._join()

    def rows(self, start: int = 0) -> list[list[Any]]:
        """Return the buckets from `start` on."""
        last = len(self._buckets) - 1
        return [b.row(open_ended=i == last) for i, b in enumerate(self._buckets) if i >= start]

    @property
    def values(self) -> list[float]:
        """The least and the greatest value of each bucket."""
        return [point[1] for b in self._buckets for point in (b.low, b.high) if point]

    def _join(self) -> None:
        self._width *= 2
        self.epoch += 1
        joined: list[_Bucket] = []
        for bucket in self._buckets:
            if joined and joined[-1].first // self._width == bucket.first // self._width:
                joined[-1].join(bucket)
            else:
                joined.append(bucket)
        self._buckets = joined


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Neighbouring steps; changed in place, because seven curves take each of a million steps."""

    first: int
    count: int = 0
    """How many of them were finite."""
    total: float = 0.0
    low: tuple[int, float] | None = None
    high: tuple[int, float] | None = None
    gap: int | None = None
    last: tuple[int, float | None] = (0, None)

    def add(self, step: int, y: float | None) -> None:
        self.last = (step, y)
        if y is None:
            self.gap = step if self.gap is None else self.gap
            return
        self.count += 1
        self.total += y
        if self.low is None or y < self.low[1]:
            self.low = (step, y)
        if self.high is None or y > self.high[1]:
            self.high = (step, y)

    def join(self, later: "_Bucket") -> None:
        self.count += later.count
        self.total += later.total
        if later.low and (self.low is None or later.low[1] < self.low[1]):
            self.low = later.low
        if later.high and (self.high is None or later.high[1] > self.high[1]):
            self.high = later.high
        self.gap = later.gap if self.gap is None else self.gap
        self.last = later.last

    def row(self, *, open_ended: bool) -> Row:
        points: dict[int, float | None] = {}
        if self.gap is not None:
            points[self.gap] = None
        points.update(point for point in (self.low, self.high) if point)
        if open_ended:
            points[self.last[0]] = self.last[1]
        # The sum of finite values need not be finite.
        mean = self.total / self.count if self.count else math.inf
        row: Row = [rounded(mean) if math.isfinite(mean) else None]
        for step in sorted(points):
            row += [step, rounded(points[step])]
        return row
