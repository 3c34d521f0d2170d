"""A step that has been queued, whose numbers may still be on their way: its record and findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from narrowcast.hardware.async_copy import AsyncCopy
from narrowcast.hardware.peak import peak_bytes
from narrowcast.health.diagnose.passes import ReplayInputs
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import FindingRecord, StepRecord


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A step that has been queued."""

    step: int
    outcome: Outcome
    losses: AsyncCopy
    """The loss, and then each of its parts."""
    items: int
    replay_inputs: ReplayInputs | None
    """What it was given, kept while it may have to be looked into."""

    def record(
        self,
        losses: Sequence[float],
        *,
        applied: bool,
        why: str,
        seconds: float,
        parts: Sequence[str],
    ) -> StepRecord:
        """Return what became of it, once its numbers are here; `parts` names those of its loss."""
        outcome, (loss, *each) = self.outcome, losses
        return StepRecord(
            step=self.step,
            loss=loss,
            loss_scale=outcome.loss_scale,
            applied=applied,
            why=why,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            lost_updates=outcome.lost_updates,
            items=self.items,
            seconds=seconds,
            peak_bytes=peak_bytes(self.device),
            parts=dict(zip(parts, each, strict=True)),
        )

    @property
    def device(self) -> torch.device:
        """Where the step was made."""
        return self.outcome.applied_on_device.device


@final
class LoggedFindings:
    """What the step log has found, handed out step by step; it may know of later ones already."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._found: list[FindingRecord] = []

    def upto(self, step: int) -> list[FindingRecord]:
        """Return what was found up to a step and not handed out yet."""
        self._found += self._prepared.findings()
        now = [each for each in self._found if each.step <= step]
        self._found = self._found[len(now) :]
        return now
