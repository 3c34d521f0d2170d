"""Read what the probes of a model have sampled: on the device in one go, to the host in one copy.

A reading costs a few dozen small kernels and is on its way while the next steps are being queued.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from narrowcast.health.probes import Probes
from narrowcast.health.sites import Site
from narrowcast.health.statistics import COLUMNS, exponent_counts, statistics, trimmed, what_if
from narrowcast.runs import ExponentRecord, HealthRecord

WORST = 4
"""Tensors whose exponents are told."""


@final
class Reading:
    """The statistics of one step, on their way from the device."""

    def __init__(self, probes: Probes, *, step: int, exponents: bool = False) -> None:
        self._sites, self._step = tuple(probes.sites), step
        with torch.no_grad():
            table = probes.grouping.rows(statistics)
            probes.counts.take_into(table)
            counts = probes.grouping.rows(exponent_counts) if exponents else None
        self._table = _Arriving(table)
        self._counts = None if counts is None else _Arriving(counts)

    def records(self) -> list[HealthRecord | ExponentRecord]:
        """Return what was read. Waits until it has arrived."""
        rows = self._table.numbers()
        health = _record(self._sites, rows, step=self._step)
        return [] if health is None else [health, *self._worst(rows)]

    def _worst(self, rows: Sequence[Sequence[float]]) -> list[ExponentRecord]:
        """Return the exponents of those tensors that lose most."""
        if self._counts is None:
            return []
        counts = self._counts.numbers()
        found = []
        order = sorted(range(len(rows)), key=lambda i: _signal(rows[i]))
        for i in order[:WORST]:
            if not _is_there(rows[i]):
                continue
            lowest, bins = trimmed([int(count) for count in counts[i]])
            site = self._sites[i]
            found.append(
                ExponentRecord(
                    step=self._step,
                    module=site.module,
                    role=site.role,
                    format=site.format,
                    lowest=lowest,
                    counts=bins,
                )
            )
        return found


def as_if(probes: Probes, name: str, *, step: int) -> HealthRecord | None:
    """Return what the samples of now would lose to another format; None where nothing has passed.

    Waits for the device.
    """
    with torch.no_grad():
        rows = what_if(torch.stack([site.sample for site in probes.sites]), name).tolist()
    return _record([replace(site, format=name) for site in probes.sites], rows, step=step)


def _record(
    sites: Sequence[Site], rows: Sequence[Sequence[float]], *, step: int
) -> HealthRecord | None:
    """Return what there is to tell of tensors; None where nothing has passed."""
    both = list(zip(sites, rows, strict=True))
    ran = {s.module for s, row in both if s.role in ("input", "output") and _is_there(row)}
    # Zeros tell something only where a module has been called and something could come of it.
    told = [
        (s, row)
        for s, row in both
        if _is_there(row) or (s.module in ran and s.role in ("output", "grad_output"))
    ]
    if not told:
        return None
    columns = {name: tuple(row[i] for _, row in told) for i, name in enumerate(COLUMNS)}
    snr = tuple(None if math.isnan(value) else value for value in columns.pop("snr_db"))
    return HealthRecord(
        step=step,
        module=tuple(site.module for site, _ in told),
        role=tuple(site.role for site, _ in told),
        format=tuple(site.format for site, _ in told),
        snr_db=snr,
        **columns,
    )


class _Arriving:
    """A matrix on its way to the host."""

    def __init__(self, matrix: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = matrix
        if matrix.is_cuda:
            self._host = torch.empty(matrix.shape, dtype=matrix.dtype, pin_memory=True)
            self._host.copy_(matrix, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def numbers(self) -> list[list[float]]:
        """Return its rows. Waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[float]] = self._host.tolist()
        return rows


def _is_there(row: Sequence[float]) -> bool:
    """Say whether anything but zeros has been sampled."""
    return row[COLUMNS.index("amax")] > 0


def _signal(row: Sequence[float]) -> float:
    """Return how much is left of a tensor: what is not finite or lost is worse than any noise."""
    told = dict(zip(COLUMNS, row, strict=True))
    lost = told["nonfinite"] + told["overflow"] + told["underflow"]
    snr = told["snr_db"]
    return (math.inf if math.isnan(snr) else snr) - 1000 * lost
