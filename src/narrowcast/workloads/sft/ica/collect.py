"""Signals stored in the dtype that was asked for, or in a wider one where that cannot hold them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.workloads.sft.ica.dtypes import NARROW, Storage, dtype_name
from narrowcast.workloads.sft.ica.findings import Finding
from narrowcast.workloads.sft.ica.signals import Signals, StoredSignals, chunk_rows
from narrowcast.workloads.sft.ica.statistics import ChannelStatistics, RunningStatistics

COARSE_SHARE = 0.01
"""Channels that a dtype may be too coarse for: half of the 2 % that a network selects."""


@final
@dataclass(frozen=True, kw_only=True)
class Collected:
    """Signals in memory, and how they came to be what they are."""

    signals: StoredSignals
    dtype: torch.dtype
    findings: tuple[Finding, ...] = ()


class _TooNarrowError(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def collect(source: Signals, storage: Storage) -> Collected:
    """Go through a source once and store it; once more, in float32, where the dtype fails it."""
    findings = storage.findings
    try:
        stored = _stored(source, storage.dtype)
        return Collected(signals=stored, dtype=storage.dtype, findings=findings)
    except _TooNarrowError as trouble:
        findings = (*findings, trouble.finding)
    stored = _stored(source, torch.float32)
    return Collected(signals=stored, dtype=torch.float32, findings=findings)


def _stored(source: Signals, dtype: torch.dtype) -> StoredSignals:
    running = RunningStatistics()
    chunks = tuple(_blocks(_looked_at(source, dtype, running), dtype, source.channels))
    statistics = running.result()
    # What came in no finer digits loses none.
    if torch.finfo(dtype).eps > torch.finfo(running.dtype).eps:
        _check_resolution(statistics, dtype)
    return StoredSignals(chunks, source.channels)


def _looked_at(source: Signals, dtype: torch.dtype, running: RunningStatistics) -> Iterator[Tensor]:
    """Yield chunks that are finite, in `dtype` too."""
    for chunk in source:
        running.add(chunk)
        if dtype in NARROW and dtype != chunk.dtype and len(chunk):
            lowest, highest = torch.aminmax(chunk)
            if max(-float(lowest), float(highest)) > torch.finfo(dtype).max:
                raise _TooNarrowError(_overflow(chunk, dtype))
        yield chunk


def _blocks(chunks: Iterator[Tensor], dtype: torch.dtype, channels: int) -> Iterator[Tensor]:
    """Put chunks of any length into blocks of one, which products are fast on.

    Nothing else is allocated beside them: holes between blocks would be memory that nobody has.
    """
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


def _overflow(chunk: Tensor, dtype: torch.dtype) -> Finding:
    limit = torch.finfo(dtype).max
    sizes = chunk.float().abs()
    count, largest = int((sizes > limit).sum()), float(sizes.max())
    return Finding(
        kind="overflow",
        what=f"{count} signals of a chunk, up to {largest:.4g}, overflow {dtype_name(dtype)}, "
        f"whose largest value is {limit:.4g}",
        answer="Signals are stored in float32",
    )


def _check_resolution(statistics: ChannelStatistics, dtype: torch.dtype) -> None:
    coarse = statistics.coarse_in(dtype)
    share = float(coarse.double().mean())
    if share > COARSE_SHARE:
        raise _TooNarrowError(
            Finding(
                kind="coarse",
                what=f"{int(coarse.sum())} of {coarse.numel()} channels spread over less than "
                f"three spacings of {dtype_name(dtype)} around their mean",
                answer="Signals are stored in float32",
            )
        )
