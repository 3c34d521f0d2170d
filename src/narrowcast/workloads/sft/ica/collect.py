"""Signals stored in the requested dtype, or clipped to percentiles.

Whitening is second order: a row with 1,000 times larger values has a million times the weight.
"""

from collections.abc import Iterator
from math import floor
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.workloads.sft.ica.signals import (
    NARROW,
    Finding,
    Kind,
    MappedSignals,
    RunningStatistics,
    Signals,
    Storage,
    StoredSignals,
    check_finite,
    chunk_rows,
    dtype_name,
    working_dtype,
)

COARSE_SHARE = 0.01
"""Share of channels a dtype may be too coarse for: half of the 2 % in a network."""


def clip_signals(source: Signals, percentile: float) -> Signals:
    """Clip channels to exact percentiles, interpolated as in numpy, in two passes."""
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
        return source
    inner, outer = extremes[..., -1], extremes[..., max(-2, -extremes.shape[-1])]
    high, low = torch.lerp(inner, outer, position - floor(position))
    return MappedSignals(source, lambda chunk: chunk.clamp(-low.to(chunk), high.to(chunk)))


class Collected(NamedTuple):
    """Stored signals and their findings."""

    signals: StoredSignals
    dtype: torch.dtype
    findings: tuple[Finding, ...] = ()


class _TooNarrowError(Exception):
    """The dtype cannot represent the signals; its argument is the finding."""


def collect(source: Signals, storage: Storage) -> Collected:
    """Store a source in one pass; in float32 in a second pass if the dtype is too narrow."""
    try:
        return Collected(_stored(source, storage.dtype), storage.dtype, storage.findings)
    except _TooNarrowError as error:
        findings = (*storage.findings, error.args[0])
    return Collected(_stored(source, torch.float32), torch.float32, findings)


def _stored(source: Signals, dtype: torch.dtype) -> StoredSignals:
    running = RunningStatistics()
    chunks = tuple(_blocks(_looked_at(source, dtype, running), dtype, source.channels))
    statistics = running.result()
    # Signals that arrive in this precision lose nothing.
    if torch.finfo(dtype).eps > torch.finfo(running.dtype).eps:
        coarse = statistics.coarse_in(dtype)
        if float(coarse.double().mean()) > COARSE_SHARE:
            what = (
                f"{int(coarse.sum())} of {coarse.numel()} channels spread over less than three "
                f"spacings of {dtype_name(dtype)} around their mean"
            )
            raise _too_narrow("coarse", what)
    return StoredSignals(chunks, source.channels)


def _looked_at(source: Signals, dtype: torch.dtype, running: RunningStatistics) -> Iterator[Tensor]:
    """Yield chunks, checked to be finite in `dtype`."""
    limit = torch.finfo(dtype).max
    for chunk in source:
        running.add(chunk)
        if dtype in NARROW and dtype != chunk.dtype and len(chunk):
            lowest, highest = torch.aminmax(chunk)
            if max(-float(lowest), float(highest)) > limit:
                sizes = chunk.float().abs()
                what = (
                    f"{int((sizes > limit).sum())} signals of a chunk, up to "
                    f"{float(sizes.max()):.4g}, overflow {dtype_name(dtype)}, whose largest value "
                    f"is {limit:.4g}"
                )
                raise _too_narrow("overflow", what)
        yield chunk


def _too_narrow(kind: Kind, what: str) -> _TooNarrowError:
    return _TooNarrowError(Finding(kind, what, answer="Signals are stored in float32"))


def _blocks(chunks: Iterator[Tensor], dtype: torch.dtype, channels: int) -> Iterator[Tensor]:
    """Copy chunks into blocks of one length; nothing else is allocated, so memory has no holes."""
    rows, block, filled = chunk_rows(channels), None, 0
    for chunk in chunks:
        rest = chunk
        while len(rest):
            if block is None:
                block, filled = rest.new_empty((rows, channels), dtype=dtype), 0
            part = rest[: rows - filled]
            block[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == rows:
                yield block
                block = None
    if block is not None:
        yield block[:filled].clone()
