"""The phases of a run: which policy is in force, and when the next one takes its place.

An end that is a step or a share of the run is known before it begins. A condition is looked at in
the record of every step and holds one step later: on a GPU that is when the host has the record
without waiting for it, and a run that was resumed must decide as one that was not.
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
"""In the place of a module: the change is of the whole model."""


@dataclass(frozen=True, kw_only=True)
class ScheduleProgress:
    """How far a run is in its schedule; part of what a checkpoint keeps."""

    phase: int = 0
    since: int = 1
    """The first step of the phase."""
    calm: int = 0
    """Steps of the phase since the last that was skipped."""
    losses: tuple[float, ...] = ()
    """Of the last steps of the phase, as many as a condition looks at."""
    met_at: int | None = None
    """The step whose record met the phase's condition."""

    def after(self, record: StepRecord, until: Until | None) -> "ScheduleProgress":
        """Return the progress once a step is known, in a phase with this end."""
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
        """Say whether the phase ends with this step."""
        if isinstance(until, ConditionSection):
            return self.met_at is not None and self.met_at < step
        end = last_step(until, steps=steps)
        return end is not None and step >= end


@final
class PrecisionSchedule:
    """Brings a prepared model into the policy of each phase of its run."""

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
        """Take in what became of a step, each once and in their order."""
        if self._phases:
            self._progress = self._progress.after(record, self._until)

    def is_due(self, step: int) -> bool:
        """Say whether another phase begins after this step."""
        return bool(self._phases) and self._progress.is_over(step, self._until, steps=self._steps)

    def advance(self, step: int) -> list[PrecisionRecord]:
        """Begin the phase that follows this step; one that is over before it begins is left out."""
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
        """Let the model have the policy of its phase, whatever it has now."""
        if not self._phases:
            return
        policy, engine = self._plan.policy, self._prepared.engine
        # A policy that was widened to this one has kept a scale, to return with.
        needless = engine.scales.value is not None and not policy.needs_loss_scale
        if self._prepared.plan.policy != policy or needless:
            self._prepared.set_policy(self._plan, loss_scale=self._scale)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the run is."""
        return {**asdict(self._progress), "losses": list(self._progress.losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up where a run stood, and bring the model into the policy it had there."""
        if state["phase"] >= max(len(self._phases), 1):
            raise CheckpointError(
                f"the checkpoint is of phase {state['phase'] + 1} of a schedule, and the recipe's "
                f"has {len(self._phases)}; write the precision.schedule the run began with"
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
