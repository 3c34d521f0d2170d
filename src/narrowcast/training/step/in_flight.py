"""Queued steps whose numbers may still be on their way to the host: records and findings."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from narrowcast.hardware.async_copy import AsyncCopy
from narrowcast.hardware.peak import peak_bytes
from narrowcast.health.diagnose.investigator import Investigator, StepDiagnosis
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
    """The loss, then each of its parts."""
    items: int
    replay_inputs: ReplayInputs | None
    """The inputs of the step, stored in case it has to be replayed."""

    def record(
        self,
        losses: Sequence[float],
        *,
        applied: bool,
        why: str,
        seconds: float,
        parts: Sequence[str],
    ) -> StepRecord:
        """Return the record of the step; `parts` are the names of its loss parts."""
        outcome, (loss, *each) = self.outcome, losses
        return StepRecord(
            step=self.step,
            loss=loss,
            loss_scale=outcome.loss_scale,
            applied=applied,
            skip_reason=why,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            lost_updates=outcome.lost_updates,
            items=self.items,
            seconds=seconds,
            peak_bytes=peak_bytes(self.device),
            loss_parts=dict(zip(parts, each, strict=True)),
        )

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        return self.outcome.applied_on_device.device


@final
class InFlight:
    """Steps in the order they were queued, until their numbers are on the host."""

    def __init__(
        self, prepared: Prepared, investigator: Investigator, *, parts: Sequence[str]
    ) -> None:
        """`investigator` looks into bad steps; `parts` are the names of the loss parts."""
        self._prepared, self._investigator, self._parts = prepared, investigator, parts
        self._unread: deque[Attempt] = deque()
        self._findings: list[FindingRecord] = []

    def __len__(self) -> int:
        return len(self._unread)

    def add(self, attempt: Attempt) -> None:
        """Add a queued step."""
        self._unread.append(attempt)

    def landed(self, *, since: float) -> tuple[StepRecord, StepDiagnosis, float]:
        """Wait for the oldest step; return its record, its diagnosis, and when it arrived."""
        attempt = self._unread.popleft()
        outcome = attempt.outcome
        applied = outcome.applied  # waits, so the clock is read after it
        now, losses = time.perf_counter(), attempt.losses.wait().tolist()
        message = self._investigator.account(
            attempt.step,
            outcome,
            loss=losses[0],
            replay_inputs=attempt.replay_inputs,
            moved=partial(self._has_moved_since, attempt),
            known=self._findings_upto(attempt.step),
        )
        record = attempt.record(
            losses, applied=applied, why=message.why, seconds=now - since, parts=self._parts
        )
        return record, message, now

    def _has_moved_since(self, attempt: Attempt) -> bool:
        """Return whether the weights have changed since an attempt. Synchronises."""
        return any(each.outcome.applied for each in (attempt, *self._unread))

    def _findings_upto(self, step: int) -> list[FindingRecord]:
        """Return the findings of the step log up to a step; it may have later ones already."""
        self._findings += self._prepared.findings()
        now = [each for each in self._findings if each.step <= step]
        self._findings = self._findings[len(now) :]
        return now
