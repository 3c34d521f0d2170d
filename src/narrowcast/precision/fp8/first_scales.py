"""Delayed fp8 scales of layers that have no past yet, and what a skipped step does to them.

The first matrix that a layer meets decides its scale. If that step is skipped, the matrix may have
been what it was skipped for: the scale is taken back, and the next matrix decides.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

import torch

from narrowcast.kernels.launch import is_capturing
from narrowcast.precision.fp8.state import Fp8Model


class StepCounts(NamedTuple):
    """How many steps there were so far."""

    applied: int
    skipped: int


@final
class FirstScales:
    """Takes back scales that no step but skipped ones has made."""

    def __init__(self, counts: Callable[[], StepCounts], *, device: torch.device) -> None:
        self._counts, self._device = counts, device
        """To ask for the counts is to wait for the device."""
        self.applied_before = 0
        """Steps that were applied before the model had these scales."""
        self._fp8: Fp8Model | None = None
        self._emulated = False
        self._known: tuple[frozenset[int], int] | None = None
        self._checked_at = math.inf

    def begin(self, fp8: Fp8Model, *, emulated: bool, step: int, applied_before: int) -> None:
        """Look after the scales of this model, as it is after so many steps."""
        self._fp8, self._emulated = fp8, emulated
        self.applied_before, self._known = applied_before, None
        self._checked_at = step if fp8.has_histories else math.inf

    def take_back(self, *, step: int) -> None:
        """Forget what skipped steps have left, once for each number of steps.

        Waits until a step was applied, and later where a scale is new: of a layer not used before.
        """
        if self._fp8 is None or step <= self._checked_at:
            return
        if is_capturing(self._device):
            return  # a capture cannot wait
        self._checked_at = step
        before, fp8 = self._known, self._fp8
        if before is None or before != self._now(fp8):
            applied = self._counts().applied > self.applied_before
            if before is not None or not applied:
                # What was known before stays: a captured step uses it as it is.
                fp8.forget(frozenset() if before is None else before[0])
            self._known = self._now(fp8) if applied else None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Know afterwards what was known before the block."""
        stored = self._checked_at, self._known
        try:
            yield
        finally:
            self._checked_at, self._known = stored

    def _now(self, fp8: Fp8Model) -> tuple[frozenset[int], int]:
        """Return what changes where a skipped step may have left a scale.

        Emulated products do not tell which scales they use, so that every skipped step counts;
        to know of it is to wait, where they are emulated on a GPU.
        """
        return fp8.decided_scales, self._counts().skipped if self._emulated else 0
