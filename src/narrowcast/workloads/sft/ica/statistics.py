"""Mean and spread of every channel, in one pass."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.dtypes import dtype_name, working_dtype
from narrowcast.workloads.sft.ica.signals import Signals

TOO_LARGE = (
    "The squares of the signals overflow {work}. Divide the signals by their largest value; the "
    "components stay the same."
)


@final
@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """What is known of each channel once all rows were seen."""

    rows: int
    mean: Tensor
    """(channels), float64."""
    spread: Tensor
    """(channels), float64: the standard deviation, 0 for a constant channel."""

    @property
    def constant(self) -> Tensor:
        """(channels), true where a channel says nothing."""
        return self.spread == 0

    def coarse_in(self, dtype: torch.dtype) -> Tensor:
        """(channels), true where rounding to `dtype` is more than a hundredth of the variance.

        Rounding has a variance of spacing² / 12, so this begins where a channel spreads over fewer
        than three spacings: outlier channels, whose mean is large beside their spread, and those
        so quiet that they end among the smallest numbers of the dtype.
        """
        about = torch.finfo(dtype)
        typical = (self.mean.square() + self.spread.square()).sqrt()
        spacing = about.eps * typical.clamp(min=about.smallest_normal)
        return ~self.constant & (self.spread < 3 * spacing)


class RunningStatistics:
    """Takes in chunks; sums of a chunk are in its working dtype, those over chunks in float64."""

    def __init__(self) -> None:
        self._rows = 0
        self.dtype = torch.float32
        """That of the latest chunk."""
        self._shift: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        self._scratch: Tensor | None = None
        self._eps = torch.finfo(torch.float32).eps

    def add(self, chunk: Tensor) -> None:
        """Take in rows. Raises where one is not finite."""
        self.dtype, work = chunk.dtype, working_dtype(chunk.dtype)
        self._eps = torch.finfo(work).eps
        if self._shift is None or self._sum is None or self._squares is None:
            # Near the mean, so that the squares below do not drown their differences.
            self._shift = chunk[:256].to(work).mean(0)
            self._sum = torch.zeros_like(self._shift, dtype=torch.float64)
            self._squares = torch.zeros_like(self._sum)
        self._scratch = centred_in(self._scratch, chunk, self._shift)
        centred = self._scratch[: len(chunk)]
        total = centred.sum(0)
        if not bool(total.isfinite().all()):
            check_finite(chunk, first_row=self._rows)
            raise ConfigError(TOO_LARGE.format(work=dtype_name(work)))
        self._rows += len(chunk)
        self._sum += total
        self._squares += centred.square_().sum(0)

    def result(self) -> ChannelStatistics:
        """Return what was seen."""
        if self._shift is None or self._sum is None or self._squares is None or self._rows < 2:
            raise ConfigError(
                f"signals must have at least a few rows per component, got {self._rows}. Give more "
                "data."
            )
        offset = self._sum / self._rows
        # Half is left to products of channels about their mean: these squares are about a shift.
        if float(self._squares.max()) > torch.finfo(self._shift.dtype).max / 2:
            raise ConfigError(TOO_LARGE.format(work=dtype_name(self._shift.dtype)))
        mean = self._shift.double() + offset
        variance = (self._squares / self._rows - offset.square()).clamp_(min=0)
        spread = variance.sqrt()
        # Below one spacing at its mean, a spread is what computing it left.
        constant = spread <= self._eps * mean.abs()
        return ChannelStatistics(
            rows=self._rows, mean=mean, spread=spread.masked_fill(constant, 0.0)
        )


def channel_statistics(signals: Signals) -> ChannelStatistics:
    """Return mean and spread of every channel."""
    running = RunningStatistics()
    for chunk in signals:
        running.add(chunk)
    return running.result()


def centred_in(scratch: Tensor | None, chunk: Tensor, mean: Tensor) -> Tensor:
    """Return a buffer whose first rows are a chunk less a mean; the one given, if it is enough.

    Cast first: an operation on two dtypes would make a copy of its own.
    """
    if scratch is None or len(scratch) < len(chunk):
        scratch = torch.empty_like(chunk, dtype=mean.dtype)
    scratch[: len(chunk)].copy_(chunk).sub_(mean)
    return scratch


def check_finite(chunk: Tensor, *, first_row: int) -> None:
    """Raise where a chunk has a number that is not finite."""
    bad = (~chunk.isfinite()).nonzero()
    if len(bad):
        row, channel = bad[0].tolist()
        raise ConfigError(
            f"The signals have {len(bad)} values that are not finite, the first in row "
            f"{first_row + row}, channel {channel}. The model itself computes them, so ica_dtype "
            "does not help. Check its weights, or load it in a wider dtype."
        )
