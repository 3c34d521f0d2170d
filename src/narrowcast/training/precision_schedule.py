"""The precision schedule of a run: which policy is active, and when the next one starts.

A condition takes effect one step late, when a GPU's host has the record without waiting.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, final

from narrowcast.config.phases import LOSSES, ConditionSection, PhaseSection, Until, last_step
from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord, StepRecord
from narrowcast.training.phase_plans import (
    each_phase,
    end_text,
    get_phases,
    phase_text,
    plan_phases,
)
from narrowcast.training.setup import make_loss_scales
from narrowcast.training.task import Task

WHOLE = "*"
"""In place of a module's name: the change applies to the whole model."""


@dataclass(frozen=True, kw_only=True)
class ScheduleProgress:
    """Position of a run in its schedule; part of a checkpoint."""

    phase: int = 0
    since: int = 1
    """First step of the phase."""
    calm: int = 0
    """Steps since the last skipped step of the phase."""
    losses: tuple[float, ...] = ()
    """Losses of the phase's last steps, as many as a condition needs."""
    met_at: int | None = None
    """Step whose record met the phase's condition."""

    def after(self, record: StepRecord, until: Until | None) -> "ScheduleProgress":
        """Return the progress after a step, in a phase with this end."""
        if self.met_at is not None or not isinstance(until, ConditionSection):
            return self
        calm = self.calm + 1 if record.applied else 0
        losses = (*self.losses, record.loss)[-LOSSES:]
        mean = sum(losses) / LOSSES if len(losses) == LOSSES else math.nan
        met = (until.calm is not None and calm >= until.calm) or (
            until.loss_below is not None and mean < until.loss_below
        )
        return replace(self, calm=calm, losses=losses, met_at=record.step if met else None)

    def is_over(self, step: int, until: Until | None, *, steps: int) -> bool:
        """Return whether the phase ends with this step."""
        if isinstance(until, ConditionSection):
            return self.met_at is not None and self.met_at < step
        end = last_step(until, steps=steps)
        return end is not None and step >= end


@final
class PrecisionSchedule:
    """Changes a prepared model to the policy of each phase."""

    def __init__(self, prepared: Prepared, recipe: Recipe, *, task: Task) -> None:
        self._prepared, self._steps = prepared, recipe.steps
        self._scale = make_loss_scales(recipe.precision.loss_scale, task)
        self._phases: Sequence[PhaseSection] = ()
        self._plans: Sequence[Plan] = ()
        self._progress = ScheduleProgress()
        if recipe.precision.schedule:
            self._phases, hardware = get_phases(recipe.precision), prepared.plan.hardware
            self._plans = plan_phases(
                recipe, prepared.model, hardware=hardware, gemm_rows=task.gemm_rows
            )
            check = partial(prepared.engine.check_plan_change, loss_scale=self._scale)
            each_phase(self._plans, check)  # before the run, not in it

    def note(self, record: StepRecord) -> None:
        """Take note of a step's record; called once per step, in order."""
        if self._phases:
            self._progress = self._progress.after(record, self._until)

    def is_due(self, step: int) -> bool:
        """Return whether another phase starts after this step."""
        return bool(self._phases) and self._progress.is_over(step, self._until, steps=self._steps)

    def advance(self, step: int) -> list[PrecisionRecord]:
        """Start the phase that follows this step, skipping phases that end before they start."""
        before, reason = self._progress.phase, self._reason()
        while self.is_due(step):
            self._progress = ScheduleProgress(phase=self._progress.phase + 1, since=step + 1)
        now = self._progress.phase
        self.apply_phase()
        record = PrecisionRecord(
            step=step + 1,
            module=WHOLE,
            before=phase_text(self._phases[before], self._plans[before]),
            after=phase_text(self._phases[now], self._plans[now]),
            reason=f"phase {now + 1} of {len(self._phases)} begins: {reason}",
        )
        return [record]

    def apply_phase(self) -> None:
        if not self._phases:
            return
        policy, engine = self._plan.policy, self._prepared.engine
        # A policy that was widened to this one has kept a scale, to return with.
        needless = engine.scales.value is not None and not policy.needs_loss_scale
        if self._prepared.plan.policy != policy or needless:
            self._prepared.set_policy(self._plan, loss_scale=self._scale)

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self._progress), "losses": list(self._progress.losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`, and change the model to the policy it had."""
        if state["phase"] >= max(len(self._phases), 1):
            raise CheckpointError(
                f"The checkpoint is in phase {state['phase'] + 1} of a precision.schedule, and the "
                f"recipe has {len(self._phases)} phases. Use the precision.schedule that the run "
                "started with."
            )
        self._progress = ScheduleProgress(**{**state, "losses": tuple(state["losses"])})
        self.apply_phase()

    @property
    def _plan(self) -> Plan:
        return self._plans[self._progress.phase]

    @property
    def _until(self) -> Until | None:
        return self._phases[self._progress.phase].until

    def _reason(self) -> str:
        end = end_text(self._until, steps=self._steps)
        met = self._progress.met_at
        return f"after {end}" if met is None else f"{end}, by step {met}"
