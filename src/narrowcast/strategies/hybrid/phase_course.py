"""The phases of a run as it goes: warm-up, full training, and in `aggressive` predictions.

Decisions are those of the state machine (`control.phases`), made between two steps from what the
records up to there say, so that a run that is resumed decides as one that was not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, final

from narrowcast.config.sections import Recipe
from narrowcast.precision.plan.phases import PHASES, Phase
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Record, StepRecord, StrategyRecord
from narrowcast.strategies.hybrid.control.phases import (
    Full,
    PhaseState,
    Warmup,
    after_outcome,
    next_decision,
)
from narrowcast.strategies.hybrid.control.settings import PhaseSettings
from narrowcast.strategies.hybrid.jump_course import JumpCourse
from narrowcast.strategies.hybrid.phase_formats import PhaseFormats
from narrowcast.training.task import Task

NO_JUMPS = "this preset makes no jumps"


def phase_settings_of(recipe: Recipe) -> PhaseSettings:
    """Return the lengths and thresholds of phases: the preset's, where the recipe says nothing."""
    asked = recipe.strategy.phases
    settings = replace(
        PhaseSettings.preset(recipe.strategy.preset),
        warmup_steps=recipe.strategy.warmup_steps(recipe.steps),
    )
    given = {name: getattr(asked, name) for name in type(asked).model_fields}
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


@final
class PhaseCourse:
    """Where a run stands among its phases, and what is done when one ends."""

    def __init__(self, prepared: Prepared, task: Task, recipe: Recipe) -> None:
        self._steps, self._settings = recipe.steps, phase_settings_of(recipe)
        self._formats = PhaseFormats(prepared, recipe, task)
        self._jumps: JumpCourse | None = None
        if recipe.strategy.has_jumps:
            self._jumps = JumpCourse(prepared, task, recipe, settings=self._settings)
        self._state = next_decision(PhaseState(), self._settings, confidence=0.0, losses=())
        self._since = 0
        """The step after which the phase began."""
        self._in_phase: Counter[str] = Counter()
        self._in_policy: Counter[str] = Counter()

    @property
    def phase(self) -> Phase:
        """The phase that the run is in."""
        return self._state.phase

    def begin(self) -> list[Record]:
        """Tell of the first phase."""
        first = f"no jump is tried in the first {self._state.decision.steps} steps"
        return [self._told(0, NO_JUMPS if self._jumps is None else first)]

    def is_due(self, step: int) -> bool:
        """Say whether the phase ends with this step."""
        return step == self._since + self._state.remaining and step < self._steps

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        """End the phase, predict if that is next, and begin the phase of the steps to come."""
        steps, before = step - self._since, self.phase
        state = after_outcome(self._state, self._settings, succeeded=True, steps=steps)
        records = list[Record]()
        if self._jumps is None:
            why = NO_JUMPS
            self._state = replace(
                state, decision=Full(self._steps), remaining=self._steps, full_done=True
            )
        else:
            state, why = self._jumps.decide(state)
            while state.phase == "predict":
                records += self._formats.apply("predict", step=step)
                state, told = self._jumps.predict(state, step=step, batches=batches)
                records += [*told, *self._formats.apply("correct", step=step)]
                state, why = self._jumps.decide(state)
            self._state = state
        self._since = step
        changed = self._formats.apply(self.phase, step=step)
        if records or changed or self.phase != before:  # the same phase once more is no news
            records.append(self._told(step, why))
        return [*records, *changed]

    def after_step(self, outcome: Outcome) -> None:
        """Let those who predict see the weights; waits for nothing."""
        if self._jumps is not None:
            self._jumps.after_step(outcome)

    def note(self, record: StepRecord) -> None:
        """Count a step, and let those who predict hear of it."""
        self._in_phase[self.phase] += 1
        self._in_policy[self._formats.texts[self.phase]] += 1
        if self._jumps is not None:
            self._jumps.note(record)

    def statistics(self) -> dict[str, float]:
        """Return what the phases came to, by name."""
        told = {f"steps in {phase}": float(self._in_phase[phase]) for phase in PHASES}
        told |= {f"steps in {text}": float(n) for text, n in sorted(self._in_policy.items())}
        return told if self._jumps is None else told | self._jumps.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the phases to come."""
        return {
            "state": self._state.to_json(),
            "since": self._since,
            "in_phase": dict(self._in_phase),
            "in_policy": dict(self._in_policy),
            "jumps": None if self._jumps is None else self._jumps.state_dict(),
        }

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Bring the model into the formats of the phase that a saved run was in."""
        self._formats.apply(PhaseState.from_json(state["state"]).phase, step=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved run stood."""
        self._state, self._since = PhaseState.from_json(state["state"]), int(state["since"])
        if self.phase == "warmup":  # of a run that is given more steps it may be longer
            steps = self._settings.warmup_steps
            self._state = replace(self._state, decision=Warmup(steps), remaining=steps)
        self._in_phase = Counter(state["in_phase"])
        self._in_policy = Counter(state["in_policy"])
        if self._jumps is not None:
            self._jumps.load_state_dict(state["jumps"])

    def _told(self, step: int, why: str) -> StrategyRecord:
        decision = self._state.decision
        assert isinstance(decision, Warmup | Full)
        return StrategyRecord(
            step=step,
            phase=self.phase,
            event="phase",
            what=f"{self.phase} begins",
            why=why,
            values={"steps": float(min(decision.steps, self._steps - step))},
            seconds=0.0,
        )
