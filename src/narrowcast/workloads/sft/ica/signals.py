"""Signals: rows (tokens) by channels, read chunk by chunk; their storage dtype and statistics.

Only storage uses `ica_dtype`. Products are in float32 (float64 for float64 signals), sums over
chunks in float64.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor

from narrowcast.errors import ConfigError

Kind = Literal[
    "dtype", "overflow", "coarse", "constant", "subspace", "solver", "convergence", "stability",
    "loud rows",
]  # fmt: skip
_log = logging.getLogger(__name__)
NARROW = (torch.float16, torch.bfloat16)
ICA_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, *NARROW)}
CHUNK_ELEMENTS = 2**22
"""16 MiB of fp32, large enough for fast products with a few dozen columns."""
TOO_LARGE = (
    "The squares of the signals overflow {work}. Divide the signals by their largest value; the "
    "components stay the same."
)


class Finding(NamedTuple):
    """Something unusual and what was done about it."""

    kind: Kind
    what: str
    answer: str

    def __str__(self) -> str:
        return f"{self.what}. {self.answer}."


class Storage(NamedTuple):
    """Storage dtype and findings."""

    dtype: torch.dtype
    findings: tuple[Finding, ...] = ()


def storage_for(
    ica_dtype: str | torch.dtype | None, model_dtype: torch.dtype | None = None
) -> Storage:
    """Return the storage dtype: auto is the model's, or float32 if that has 16 bits."""
    if isinstance(ica_dtype, torch.dtype):
        ica_dtype = dtype_name(ica_dtype)
    if ica_dtype == "auto":
        return Storage(torch.float64 if model_dtype == torch.float64 else torch.float32)
    if ica_dtype is None or ica_dtype in ICA_DTYPES:
        return Storage(ICA_DTYPES[ica_dtype or "float32"])
    what = f"ica_dtype must be auto, {', '.join(ICA_DTYPES)}, got {ica_dtype!r}"
    finding = Finding("dtype", what, "Using float32")
    _log.warning("%s", finding)
    return Storage(torch.float32, (finding,))


def working_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products."""
    return torch.float64 if stored == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


class Signals(Protocol):
    """A source of (rows, channels) chunks that can be iterated repeatedly."""

    @property
    def channels(self) -> int: ...

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the same rows in the same order, each time."""
        ...


def chunk_rows(channels: int) -> int:
    """Return the number of rows per chunk."""
    return max(64, CHUNK_ELEMENTS // max(channels, 1))


@final
class ArraySignals:
    """Signals from an array."""

    def __init__(self, array: Tensor | np.ndarray) -> None:
        try:
            self.array = torch.as_tensor(array)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"signals must be an array, got {type(array)}: {error}.") from None
        if self.array.dim() != 2:
            raise ConfigError(
                "signals must have two dimensions, rows and channels, got shape "
                f"{tuple(self.array.shape)}."
            )

    @property
    def channels(self) -> int:
        return self.array.shape[1]

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.array.split(chunk_rows(self.channels))


@final
@dataclass(frozen=True, kw_only=True)
class FileSignals:
    """Signals from a raw binary file, one chunk in memory at a time."""

    path: Path
    channels: int
    dtype: str = "float32"
    """numpy name."""

    def __iter__(self) -> Iterator[Tensor]:
        stored = np.dtype(self.dtype)
        row = self.channels * stored.itemsize
        if (size := self.path.stat().st_size) % row:
            raise ConfigError(
                f"{self.path} has {size} bytes, which is not a whole number of rows of "
                f"{self.channels} {self.dtype}. Pass the right number of channels."
            )
        # One buffer for all chunks: copy a chunk to keep it. Pinned, so that a GPU copies it;
        # a CPU copy would be half as fast as reading the file.
        space = torch.empty(
            chunk_rows(self.channels) * row,
            dtype=torch.uint8,
            pin_memory=torch.cuda.is_initialized(),
        ).numpy()
        buffer = space.view(stored).reshape(-1, self.channels)
        with self.path.open("rb", buffering=0) as file:
            while count := file.readinto(space.data):
                yield torch.from_numpy(buffer[: count // row])


@final
@dataclass(frozen=True)
class MappedSignals:
    """Signals with a function applied to each chunk, such as a move to a device."""

    source: Signals
    function: Callable[[Tensor], Tensor]

    @property
    def channels(self) -> int:
        return self.source.channels

    def __iter__(self) -> Iterator[Tensor]:
        # One at a time: the source may reuse the memory of a chunk.
        yield from map(self.function, self.source)


@final
@dataclass(frozen=True)
class StoredSignals:
    """Signals in memory."""

    chunks: tuple[Tensor, ...]
    channels: int

    @property
    def rows(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def bytes(self) -> int:
        return sum(chunk.numel() * chunk.element_size() for chunk in self.chunks)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.chunks

    def columns(self, start: int, stop: int) -> "StoredSignals":
        """Return a view of some channels."""
        return StoredSignals(tuple(c[:, start:stop] for c in self.chunks), stop - start)


@final
@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """Statistics per channel."""

    rows: int
    mean: Tensor
    """(channels), float64."""
    spread: Tensor
    """(channels), float64: standard deviation, 0 for a constant channel."""

    @property
    def constant(self) -> Tensor:
        return self.spread == 0

    def coarse_in(self, dtype: torch.dtype) -> Tensor:
        """Return the channels for which rounding, spacing² / 12, exceeds 1 % of the variance."""
        about = torch.finfo(dtype)
        typical = (self.mean.square() + self.spread.square()).sqrt()
        spacing = about.eps * typical.clamp(min=about.smallest_normal)
        return ~self.constant & (self.spread < 3 * spacing)


class RunningStatistics:
    """Accumulates chunks; sums over chunks are in float64."""

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
        """Add rows; raise for nonfinite values."""
        self.dtype, work = chunk.dtype, working_dtype(chunk.dtype)
        self._eps = torch.finfo(work).eps
        if self._shift is None or self._sum is None or self._squares is None:
            # Near the mean, to avoid cancellation in the squares.
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
        if self._shift is None or self._sum is None or self._squares is None or self._rows < 2:
            raise ConfigError(
                f"signals must have at least a few rows per component, got {self._rows}. Give more "
                "data."
            )
        offset = self._sum / self._rows
        # Half of the range is left for products about the mean; these squares are about a shift.
        if float(self._squares.max()) > torch.finfo(self._shift.dtype).max / 2:
            raise ConfigError(TOO_LARGE.format(work=dtype_name(self._shift.dtype)))
        mean = self._shift.double() + offset
        variance = (self._squares / self._rows - offset.square()).clamp_(min=0)
        spread = variance.sqrt()
        # A spread below one spacing at the mean is rounding.
        constant = spread <= self._eps * mean.abs()
        return ChannelStatistics(
            rows=self._rows, mean=mean, spread=spread.masked_fill(constant, 0.0)
        )


def channel_statistics(signals: Signals) -> ChannelStatistics:
    """Return the statistics of signals."""
    running = RunningStatistics()
    for chunk in signals:
        running.add(chunk)
    return running.result()


def centred_in(scratch: Tensor | None, chunk: Tensor, mean: Tensor) -> Tensor:
    """Return a buffer with chunk - mean, reusing `scratch`; casts first to avoid a second copy."""
    if scratch is None or len(scratch) < len(chunk):
        scratch = torch.empty_like(chunk, dtype=mean.dtype)
    scratch[: len(chunk)].copy_(chunk).sub_(mean)
    return scratch


def check_finite(chunk: Tensor, *, first_row: int) -> None:
    """Raise if a chunk has nonfinite values."""
    bad = (~chunk.isfinite()).nonzero()
    if len(bad):
        row, channel = bad[0].tolist()
        raise ConfigError(
            f"The signals have {len(bad)} values that are not finite, the first in row "
            f"{first_row + row}, channel {channel}. The model itself computes them, so ica_dtype "
            "does not help. Check its weights, or load it in a wider dtype."
        )
