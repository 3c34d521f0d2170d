"""Windows of time series, gathered on the device by the number of their first row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ranges = Sequence[tuple[int, int]]
"""Rows of each series whose values are forecast; the lookback may begin before them."""


class Window(NamedTuple):
    """A batch of windows: scaled values, and what is known beside them."""

    x: Tensor
    """Lookback: windows × channels × lookback."""
    y: Tensor
    """Forecast rows: windows × channels × horizon."""
    observed: Tensor | None
    """Which values of `y` were observed; None if all were."""
    past: Tensor | None
    """Windows × columns × lookback."""
    future: Tensor | None
    """Windows × columns × (lookback + horizon)."""
    static: Tensor | None
    """Windows × columns."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSeries:
    """All series on the device, rows last, so that a window is a contiguous stretch per channel."""

    values: Tensor
    """Scaled values: channels × rows."""
    observed: Tensor | None
    past: Tensor | None
    future: Tensor | None
    static: Tensor | None
    """Series × columns."""
    series_of_row: Tensor | None
    """Series of every row; None if there is nothing static."""
    lookback: int
    horizon: int

    def windows(self, starts: Tensor) -> Window:
        """Return the windows that begin at these rows; does not synchronise."""
        cut, length = self.lookback, self.lookback + self.horizon
        rows = _gather(self.values, starts, length)
        observed = self.observed
        static = None
        if self.static is not None and self.series_of_row is not None:
            static = self.static[self.series_of_row[starts]]
        return Window(
            x=rows[..., :cut],
            y=rows[..., cut:],
            observed=None if observed is None else _gather(observed, starts, length)[..., cut:],
            past=None if self.past is None else _gather(self.past, starts, cut),
            future=None if self.future is None else _gather(self.future, starts, length),
            static=static,
        )


def _gather(series: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return stretches (starts, channels, length) of channels × rows, in one copy per stretch."""
    return series.unfold(1, length, 1).transpose(0, 1).index_select(0, starts)


@final
@dataclass(frozen=True, eq=False)
class Starts:
    """First rows of windows, as a dataset: a batch is a tensor of them."""

    rows: Tensor
    """int64, on the CPU."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Return the first rows of some windows."""
        return self.rows[torch.as_tensor(indices)]

    def spread(self, count: int | None) -> "Starts":
        """Return `count` of them, spread evenly; all of them for None."""
        if count is None or count >= len(self):
            return self
        return Starts(self.rows[torch.arange(count) * len(self) // count])

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield them in order, `size` at a time."""
        yield from self.rows.split(size)


def find_starts(
    ranges: Ranges, *, offsets: Sequence[int], lookback: int, horizon: int, stride: int = 1
) -> Starts:
    """Return all windows whose forecast rows lie in the range of their series."""
    parts = list[npt.NDArray[np.int64]]()
    for series, (first, end) in enumerate(ranges):
        begin = max(offsets[series], first - lookback)
        parts.append(np.arange(begin, end - lookback - horizon + 1, stride, dtype=np.int64))
    return Starts(torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64)))
