"""Which bad steps of a run are replayed, and what is reported of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import DivergedError
from narrowcast.health.diagnose.diagnosis import Diagnosis
from narrowcast.health.diagnose.explain import replay
from narrowcast.health.diagnose.passes import ReplayInputs
from narrowcast.health.faults.faults import Faults, StepFaults
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.step_log import AT_FLOOR
from narrowcast.runs import FindingRecord

AGAIN = 50
"""Bad steps of a row between two that are replayed: what is wrong with one is wrong with most."""
FREE, SHARE = 4, 0.01
"""Replays of a run: these, and this share of its steps. A replay takes about two steps."""


@dataclass(frozen=True, kw_only=True)
class StepDiagnosis:
    """The report of a step."""

    why: str
    """For its record; empty if it was applied."""
    findings: Sequence[FindingRecord] = ()
    explained: bool = False
    """Whether this step or an earlier one of its row has a diagnosis."""
    injected: bool = False
    """The step had faults that the recipe asks for."""
    overflowed_at: tuple[str, str] | None = None
    """The module and role that overflowed a format, where a wider one would have held it."""


@final
class Investigator:
    """Looks into the bad steps of a run."""

    def __init__(
        self,
        prepared: Prepared,
        loss_fn: Callable[[Any], Tensor],
        *,
        diagnose: bool,
        faults: Faults | None = None,
        backward: Callable[[Tensor, int], None] | None = None,
    ) -> None:
        """Look into steps whose loss `loss_of` a batch is, and `backward` as `replay` takes it."""
        self._prepared, self._loss_fn, self._backward = prepared, loss_fn, backward
        self._verdicts, self._faults = diagnose, faults
        self._replays = self._row = 0
        self._named = ""
        self._explained = False
        self._overflowed_at: tuple[str, str] | None = None

    def before(self, batches: Sequence[Any]) -> ReplayInputs | None:
        """Return what has to be kept of a step until its outcome is known."""
        return ReplayInputs.before(self._prepared, batches) if self._verdicts else None

    def faults_at(self, step: int) -> StepFaults | None:
        return None if self._faults is None else self._faults.at(step)

    def account(
        self,
        step: int,
        outcome: Outcome,
        *,
        loss: float,
        replay_inputs: ReplayInputs | None,
        moved: Callable[[], bool],
        known: Sequence[FindingRecord] = (),
    ) -> StepDiagnosis:
        """Report a step with a known outcome; `moved`: whether the weights have changed since."""
        injected = self.faults_at(step)
        lines = [] if injected is None else _announced(step, injected)
        if outcome.applied and math.isfinite(loss):
            self._named = ""
            self.begin_row()
            return StepDiagnosis(why="", findings=[*lines, *known], injected=injected is not None)
        # A rehearsal does not count towards a row: it says nothing about other steps.
        self._row += injected is None
        # A rehearsal is there to be looked into.
        due = injected is not None or self._is_due(step)
        why, verdict, later = outcome.skip_reason, None, ""
        if replay_inputs is not None and due:
            later = ", with the weights of a later step," if moved() else ""
            verdict, why = self._look_into(outcome, replay_inputs, injected, later=later)
        if verdict is None:
            lines += known
        else:
            self._named = f"In step {step} {verdict.sentence}: {verdict.advice(loss_scale=1.0)}"
            finding = _finding(step, verdict, outcome, later=later)
            lines += [_joined(finding, each, verdict, outcome) for each in known] or [finding]
        if injected is not None:
            return StepDiagnosis(
                why=why, findings=lines, explained=verdict is not None, injected=True
            )
        if verdict is not None:
            # What is wrong with the model is so in the next step too; another batch may be fine.
            self._explained = verdict.origin == "model"
            self._overflowed_at = verdict.overflowed_at
        explained = verdict is not None or self._explained
        return StepDiagnosis(
            why=why, findings=lines, explained=explained, overflowed_at=self._overflowed_at
        )

    def begin_row(self) -> None:
        """Take the next bad step for the first of a row: formats have changed, or one was good."""
        self._row, self._explained, self._overflowed_at = 0, False, None

    def named(self, error: DivergedError) -> DivergedError:
        """Return the error with the findings of the steps before it, if there are any."""
        return DivergedError(error.fact, self._named) if self._named else error

    def state_dict(self) -> dict[str, Any]:
        """Return what decides which steps are looked into, and what was found in this row."""
        return {
            "replays": self._replays,
            "row": self._row,
            "named": self._named,
            "explained": self._explained,
            "overflowed_at": self._overflowed_at and list(self._overflowed_at),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._replays, self._row = state["replays"], state["row"]
        self._named, self._explained = state.get("named", ""), state.get("explained", False)
        overflowed_at = state.get("overflowed_at")
        self._overflowed_at = (
            None if overflowed_at is None else (overflowed_at[0], overflowed_at[1])
        )

    def _look_into(
        self,
        outcome: Outcome,
        replay_inputs: ReplayInputs,
        injected: StepFaults | None,
        *,
        later: str,
    ) -> tuple[Diagnosis | None, str]:
        """Replay a step; return the verdict, if there is one, and the reason for its record."""
        self._replays += 1
        try:
            around = None if injected is None else injected.during
            verdict = replay(
                self._prepared,
                replay_inputs,
                self._loss_fn,
                around=around,
                backward=self._backward,
            )
        except torch.OutOfMemoryError:
            # Eager passes hold more than those of a compiled, or captured, step.
            torch.cuda.empty_cache()
            return None, _with(outcome.skip_reason, "not enough memory for a replay")
        if verdict is None:
            return None, _with(outcome.skip_reason, f"a replay{later} did not reproduce it")
        scale = _scale_change(outcome)
        why = f"not finite: {verdict.where}{scale and '; loss ' + scale}"
        return verdict, "" if outcome.applied else why

    def _is_due(self, step: int) -> bool:
        return self._row % AGAIN == 1 and self._replays + 1 <= FREE + SHARE * step


def _finding(step: int, verdict: Diagnosis, outcome: Outcome, *, later: str) -> FindingRecord:
    scale = _scale_change(outcome)
    skipped = f"the step is skipped{scale and '; ' + scale}"
    return FindingRecord(
        step=step,
        since=step,
        module=verdict.module,
        role=verdict.role,
        what=verdict.what,
        why=verdict.sentence + (f"; as seen in a replay{later.rstrip(',')}" if later else ""),
        action="" if outcome.applied else skipped,
        advice=verdict.advice(loss_scale=outcome.loss_scale),
        rank=verdict.rank,
    )


def _joined(
    finding: FindingRecord, logged: FindingRecord, verdict: Diagnosis, outcome: Outcome
) -> FindingRecord:
    """Report once an overflow that no scale can absorb: how it began, and what follows."""
    at_floor = logged.what == AT_FLOOR
    floor = f"; the scale is {outcome.loss_scale:g}, its minimum" if at_floor else ""
    return replace(
        finding,
        since=logged.since,
        what=AT_FLOOR if at_floor and verdict.what == "overflow" else verdict.what,
        why=finding.why + floor,
        action=logged.action,
        advice=verdict.advice(loss_scale=1.0),  # where it gives way no more
    )


def _announced(step: int, faults: StepFaults) -> list[FindingRecord]:
    return [
        FindingRecord(
            step=step,
            since=step,
            module=name,
            role=fault.role,
            what="fault injected",
            why=f"fault injection: the recipe adds {fault}",
            action="the step runs in eager mode; runs with faults do not use CUDA graphs",
            advice="remove faults from the recipe for a real run",
        )
        for fault, name in faults.faults
    ]


def _scale_change(outcome: Outcome) -> str:
    if outcome.next_scale == outcome.loss_scale:
        return ""
    return f"scale {outcome.loss_scale:g} → {outcome.next_scale:g}"


def _with(why: str, more: str) -> str:
    """Add to a reason that ends, as any does, with what became of the scale."""
    if not why:
        return why  # an applied step has none
    names, scale, change = why.partition("; loss scale ")
    return f"{names}; {more}{scale}{change}"
