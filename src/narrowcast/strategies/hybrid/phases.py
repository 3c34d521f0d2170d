"""The phases of a run: warmup, full training and, in `aggressive`, predict and correct.

| from | to | when |
|---|---|---|
| warmup | full | `warmup_steps` are done |
| full | full | no jump is tried, or the run diverged |
| full | predict | a jump is likely enough to be accepted |
| predict | full | the jump was accepted |
| predict | correct | the jump was rejected, and half of it is tried |
| correct | full | the half was accepted, or every bit was put back |

Predict and correct lie between two training steps. Decisions use only the records up to there, so
a resumed run decides like one that was not interrupted.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, final

from narrowcast.config.sections import Recipe
from narrowcast.precision.plan.phases import PHASES, Phase
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Record, StepRecord, StrategyRecord
from narrowcast.strategies.hybrid.jumps import JumpCourse
from narrowcast.strategies.hybrid.phase_formats import PhaseFormats
from narrowcast.training.task import Task

NO_JUMPS = "this preset makes no jumps"


@final
class PhaseCourse:
    """The current phase of a run, and what is done when one ends."""

    def __init__(self, prepared: Prepared, task: Task, recipe: Recipe) -> None:
        self._steps = recipe.steps
        self._warmup_steps = recipe.strategy.warmup_steps(recipe.steps)
        self._full_steps = recipe.strategy.phases.full_steps
        self._formats = PhaseFormats(prepared, recipe, task)
        self._jumps: JumpCourse | None = None
        if recipe.strategy.has_jumps:
            self._jumps = JumpCourse(prepared, task, recipe, formats=self._formats)
        self.phase: Phase = "warmup"
        self._end: int | None = self._warmup_steps
        """The last step of the phase; None if it lasts until the run ends."""
        self._in_phase: Counter[str] = Counter()
        self._in_policy: Counter[str] = Counter()

    def begin(self) -> list[Record]:
        """Return the record of the first phase."""
        why = f"no jump is tried in the first {self._warmup_steps} steps"
        return [self._record(0, NO_JUMPS if self._jumps is None else why)]

    def is_due(self, step: int) -> bool:
        return step == self._end and step < self._steps

    def act(self, step: int, *, batches: int) -> list[Record]:
        """End the phase, jump if that is next, and begin the phase of the next steps."""
        records, was, diverged = list[Record](), self.phase, ""
        self._end, why = None, NO_JUMPS
        if self._jumps is not None:
            diverged = self._jumps.divergence()
            why = diverged or "training continues after the warm-up"
            if was == "full" and not diverged:
                why = self._jumps.refusal()
            if not why:
                records = self._jumps.jump(step, batches=batches)
                why = "training continues after the jump"
            # After a divergence, training has twice as long before the next jump.
            self._end = step + self._full_steps * (2 if diverged else 1)
        self.phase = "full"
        changes = self._formats.apply("full", step=step)
        if records or changes or diverged or was != "full":
            records.append(self._record(step, why))
        return [*records, *changes]

    def after_step(self, outcome: Outcome) -> None:
        """Record the weights for predictions. Does not synchronise."""
        if self._jumps is not None:
            self._jumps.after_step(outcome)

    def note(self, record: StepRecord) -> None:
        """Count a step, and look for divergence."""
        self._in_phase[self.phase] += 1
        self._in_policy[self._formats.texts[self.phase]] += 1
        if self._jumps is not None:
            self._jumps.note(record)

    def statistics(self) -> dict[str, float]:
        """Return steps by phase and by policy, and what jumps did, by name."""
        counts = {f"steps in {phase}": float(self._in_phase[phase]) for phase in PHASES}
        counts |= {f"steps in {text}": float(n) for text, n in sorted(self._in_policy.items())}
        if self._jumps is None:
            return counts
        return counts | self._jumps.statistics(steps=self._in_phase.total())

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "end": self._end,
            "in_phase": dict(self._in_phase),
            "in_policy": dict(self._in_policy),
            "jumps": None if self._jumps is None else self._jumps.state_dict(),
        }

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Change the model to the formats of the phase that a saved run was in."""
        self._formats.apply(state["phase"], step=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phase, self._end = state["phase"], state["end"]
        if self.phase == "warmup":  # it may be longer in a run that is resumed with more steps
            self._end = self._warmup_steps
        self._in_phase = Counter(state["in_phase"])
        self._in_policy = Counter(state["in_policy"])
        if self._jumps is not None:
            self._jumps.load_state_dict(state["jumps"])

    def _record(self, step: int, why: str) -> StrategyRecord:
        end = self._steps if self._end is None else min(self._end, self._steps)
        return StrategyRecord(
            step=step,
            phase=self.phase,
            event="phase",
            what=f"{self.phase} begins",
            why=why,
            values={"steps": float(end - step)},
            seconds=0.0,
        )
