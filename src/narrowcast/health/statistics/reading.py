"""Read all samples of a model with a few dozen small kernels and one asynchronous copy."""

import math
from collections.abc import Sequence
from typing import final

import torch

from narrowcast.hardware.transfers import AsyncCopy
from narrowcast.health.statistics.grouping import unsafe_to_lower
from narrowcast.health.statistics.probes import Probes
from narrowcast.health.statistics.statistics import (
    COLUMNS,
    exponent_counts,
    statistics,
    trimmed,
    what_if,
)
from narrowcast.runs import ExponentRecord, HealthRecord

WORST = 4
"""Tensors whose exponents are reported."""
FORWARD = ("input", "output")
"""Roles of tensors in a forward pass."""


@final
class Reading:
    """The statistics of one step, on their way from the device."""

    def __init__(
        self, probes: Probes, *, step: int, exponents: bool = False, forward_only: bool = False
    ) -> None:
        """Read the samples of a step; of a `forward_only` step no gradients and updates."""
        self._sites, self._step, self._grouping = tuple(probes.sites), step, probes.grouping
        self._seen = probes.seen()
        self.forward_only = forward_only
        if forward_only:
            pairs = zip(self._sites, self._seen, strict=True)
            self._seen = [seen and site.role in FORWARD for site, seen in pairs]
        with torch.no_grad():
            self._stacks = self._grouping.stacks()
            table = self._grouping.rows(self._stacks, statistics)
            probes.counts.take_into(table)
            counts = self._grouping.rows(self._stacks, exponent_counts) if exponents else None
            self._supposed_sites = probes.what_if.sites
            self._supposed = AsyncCopy(probes.what_if.rows())
        self._table = AsyncCopy(table)
        self._counts = None if counts is None else AsyncCopy(counts)

    def records(self) -> list[HealthRecord | ExponentRecord]:
        """Return what was read. Waits until it has arrived."""
        rows = self._table.wait().tolist()
        health = self._record(rows, [site.format for site in self._sites])
        return [] if health is None else [health, *self._worst(rows)]

    def unsafe_to_lower(self, *, scaled: bool) -> list[str]:
        """Return modules whose own formats would not have held the values. Synchronises."""
        return [
            *unsafe_to_lower(self._supposed_sites, self._supposed.wait().tolist(), scaled=scaled)
        ]

    def as_if(self, name: str) -> HealthRecord | None:
        """Return the loss of these samples to another format, or None. Synchronises."""
        with torch.no_grad():
            rows = what_if(self._grouping.in_order(self._stacks), name).tolist()
        return self._record(rows, [name] * len(rows))

    def _record(
        self, rows: Sequence[Sequence[float]], formats: Sequence[str]
    ) -> HealthRecord | None:
        """Return the statistics of the tensors, or None if nothing has passed."""
        every = zip(self._sites, rows, formats, self._seen, strict=True)
        both = [(site, row, name) for site, row, name, seen in every if seen]
        ran = {s.module for s, row, _ in both if s.role in FORWARD and _is_there(row)}
        # Zeros tell something only where a module has been called and something could come of it.
        lines = [
            (s, row, name)
            for s, row, name in both
            if _is_there(row) or (s.module in ran and s.role in ("output", "grad_output"))
        ]
        if not lines:
            return None
        columns = {name: tuple(row[i] for _, row, _ in lines) for i, name in enumerate(COLUMNS)}
        snr = tuple(None if math.isnan(value) else value for value in columns.pop("snr_db"))
        return HealthRecord(
            step=self._step,
            module=tuple(site.module for site, _, _ in lines),
            role=tuple(site.role for site, _, _ in lines),
            format=tuple(name for _, _, name in lines),
            snr_db=snr,
            **columns,
        )

    def _worst(self, rows: Sequence[Sequence[float]]) -> list[ExponentRecord]:
        """Return the exponents of those tensors that lose most."""
        if self._counts is None:
            return []
        counts = self._counts.wait().tolist()
        result = []
        there = [i for i, row in enumerate(rows) if self._seen[i] and _is_there(row)]
        for i in sorted(there, key=lambda i: _signal(rows[i]))[:WORST]:
            lowest, bins = trimmed([int(count) for count in counts[i]])
            site = self._sites[i]
            result.append(
                ExponentRecord(
                    step=self._step,
                    module=site.module,
                    role=site.role,
                    format=site.format,
                    lowest=lowest,
                    counts=bins,
                )
            )
        return result


def _is_there(row: Sequence[float]) -> bool:
    """Return whether anything but zeros has been sampled."""
    return row[COLUMNS.index("amax")] > 0


def _signal(row: Sequence[float]) -> float:
    """Return how much is left of a tensor: what is not finite or lost is worse than any noise."""
    info = dict(zip(COLUMNS, row, strict=True))
    lost = info["nonfinite"] + info["overflow"] + info["underflow"]
    snr = info["snr_db"]
    return (math.inf if math.isnan(snr) else snr) - 1000 * lost
