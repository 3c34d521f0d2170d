"""The phases of a run: warmup, full training and, in `aggressive`, predict and correct.

| from | to | when |
|---|---|---|
| warmup | full | `warmup_steps` are done |
| full | full | nothing is predicted, or the run diverged |
| full | predict | a prediction is likely enough to be accepted |
| predict | predict | the predicted weights are accepted; the line is followed further |
| predict | correct | they are rejected; half of the movement is verified |
| correct | full | the half is accepted or rejected |

A window is the steps that one verification takes. The steps of predict and correct have no backward
pass: each compares the losses of present and predicted weights on its micro-batches, and the
weights move at the end of a window, or not at all. Decisions use only the records up to there, so a
resumed run decides like one that was not interrupted.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from narrowcast.config.strategy import StrategySection
from narrowcast.errors import ConfigError
from narrowcast.precision.plan.phases import PHASES, Phase
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Record, StrategyRecord
from narrowcast.strategies.hybrid.divergence import DivergenceMonitor
from narrowcast.strategies.hybrid.history import FEWEST_SNAPSHOTS, SNAPSHOTS
from narrowcast.strategies.hybrid.jumper import HALF, Jumper, attempt_cost
from narrowcast.strategies.hybrid.phase_formats import PhaseFormats
from narrowcast.strategies.hybrid.readout.choice import STEP_COST

SHORTEST_JUMP = 10
"""Steps of the shortest prediction, where `max_predict_steps` allows as many."""
NO_PREDICTIONS = (
    "predict and correct do not occur, because they do not pay: strategy.preset=aggressive, which "
    "has them, saved fewer steps than balanced on six of seven tasks in benchmarks"
)


@final
class PhaseCourse:
    """The current phase of a run, and what is done when one ends."""

    def __init__(
        self,
        prepared: Prepared,
        settings: StrategySection,
        *,
        steps: int,
        formats: PhaseFormats,
        micro_batches: int = 1,
    ) -> None:
        """Take the steps of the run, and the micro-batches of each."""
        self._prepared, self._settings, self._formats = prepared, settings, formats
        self._steps, self._micro_batches = steps, micro_batches
        self._warmup_steps = settings.warmup_steps(steps)
        self._jumper: Jumper | None = None
        if settings.has_jumps:
            check_first_jump(settings, steps=steps, micro_batches=micro_batches)
            self._jumper = Jumper(
                prepared,
                every=snapshot_interval(settings),
                budget=jump_budget(settings, steps=steps, micro_batches=micro_batches),
                batches=settings.jumps.micro_batches,
            )
        self._monitor = DivergenceMonitor(sigma=settings.phases.divergence_sigma)
        self._divergences, self._horizon = 0, 0
        self.phase: Phase = "warmup"
        self._end: int | None = self._warmup_steps
        """The last step of the phase or window; None if the phase lasts until the run ends."""
        self._in_phase: Counter[str] = Counter()
        self._in_policy: Counter[str] = Counter()

    @property
    def is_forward_only(self) -> bool:
        """Whether the steps of this phase have no backward pass."""
        return self.phase in ("predict", "correct")

    def begin(self) -> list[Record]:
        """Return the record of the first phase."""
        why = f"nothing is predicted in the first {self._warmup_steps} steps"
        return [self._record(0, NO_PREDICTIONS if self._jumper is None else why)]

    def is_due(self, step: int) -> bool:
        return step == self._end and step < self._steps

    def act(self, step: int) -> list[Record]:
        """End the phase or its window, and begin what is next. Synchronises."""
        if self._jumper is None:
            return self._enter("full", step, NO_PREDICTIONS)
        if self.is_forward_only:
            return self._verify(self._jumper, step)
        diverged, self._monitor = self._monitor.problem, self._monitor.cleared()
        self._divergences += bool(diverged)
        if self.phase == "warmup" or diverged:
            why = diverged or "training continues after the warm-up"
            # After a divergence, training has twice as long before the next prediction.
            return self._enter("full", step, why, times=2 if diverged else 1)
        if why := self._refusal(self._jumper, step):
            return self._enter("full", step, why)
        return self._predict(self._jumper, step)

    def compare(self, losses: Callable[[], Tensor]) -> tuple[Outcome, Tensor]:
        """Take a step without a backward pass; return its outcome and its mean losses.

        `losses()` returns a row for each micro-batch, the total loss first. Does not synchronise.
        """
        assert self._jumper is not None
        mean = self._jumper.compare(losses).mean(0)
        return self._prepared.engine.forward_step(mean[0]), mean

    def after_step(self, outcome: Outcome) -> None:
        """Record the weights for predictions. Does not synchronise."""
        if self._jumper is not None and not outcome.forward_only:
            self._jumper.observe(outcome.step)

    def note(self, *, loss: float, grad_norm: float, applied: bool) -> None:
        """Count a step, and look for divergence."""
        self._in_phase[self.phase] += 1
        self._in_policy[self._formats.texts[self.phase]] += 1
        if self._jumper is not None and applied and not self.is_forward_only:
            self._monitor = self._monitor.after(loss, grad_norm)

    def statistics(self) -> dict[str, float]:
        """Return steps by phase and by policy, and what predictions did, by name."""
        counts = {f"steps in {phase}": float(self._in_phase[phase]) for phase in PHASES}
        counts |= {f"steps in {text}": float(n) for text, n in sorted(self._in_policy.items())}
        if self._jumper is None:
            return counts
        account = self._jumper.account
        trained = self._in_phase["warmup"] + self._in_phase["full"]
        return counts | {
            "jumps tried": float(account.tried),
            "jumps accepted": float(account.accepted),
            "forward passes spent": account.spent,
            "step equivalents": trained + account.spent / (STEP_COST * self._micro_batches),
            "divergences": float(self._divergences),
            "history bytes": float(self._jumper.history.bytes()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "end": self._end,
            "horizon": self._horizon,
            "in_phase": dict(self._in_phase),
            "in_policy": dict(self._in_policy),
            "monitor": self._monitor.to_json(),
            "divergences": self._divergences,
            "jumper": None if self._jumper is None else self._jumper.state_dict(),
        }

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Change the model to the formats of the phase that a saved run was in."""
        self._formats.apply(state["phase"], step=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phase, self._end = state["phase"], state["end"]
        if self.phase == "warmup":  # it may be longer in a run that is resumed with more steps
            self._end = self._warmup_steps
        self._horizon, self._divergences = int(state["horizon"]), int(state["divergences"])
        self._in_phase = Counter(state["in_phase"])
        self._in_policy = Counter(state["in_policy"])
        self._monitor = DivergenceMonitor(**state["monitor"])
        if self._jumper is not None:
            self._jumper.load_state_dict(state["jumper"])

    @property
    def _window(self) -> int:
        return window_steps(self._settings, micro_batches=self._micro_batches)

    def _refusal(self, jumper: Jumper, step: int) -> str:
        """Return why nothing is predicted now; empty if something is."""
        account = jumper.account
        if not account.is_confident(self._settings.phases.confidence_threshold):
            return f"a jump is accepted with a probability of {account.confidence:.2f}"
        if len(jumper.history) < FEWEST_SNAPSHOTS:
            return "too few past weights are known yet"
        return jumper.refusal() or self._too_late(step)

    def _too_late(self, step: int) -> str:
        enough = step + self._window < self._steps
        return "" if enough else "the run ends before a prediction could be verified"

    def _predict(self, jumper: Jumper, step: int) -> list[Record]:
        """Begin a window of predict."""
        longest = self._settings.phases.max_predict_steps
        self._horizon = jump_length(longest, jumper.account.confidence)
        if self.phase == "predict":
            self._end = step + self._window
            jumper.begin(self._horizon)
            return []
        self._prepared.engine.weights.forget_gradients()  # no forward pass needs their memory
        why = f"the weights follow a line, {self._horizon} steps ahead"
        records = self._enter("predict", step, why)
        jumper.begin(self._horizon)
        return records

    def _verify(self, jumper: Jumper, step: int) -> list[Record]:
        """End a window of predict or correct: move the weights if its losses fell."""
        began, account = time.perf_counter(), jumper.account
        result = jumper.decide()
        ending = "accepted" if result.accepted else "rejected"
        steps = "1 step" if self._horizon == 1 else f"{self._horizon} steps"
        record = StrategyRecord(
            step=step,
            phase=self.phase,
            event="jump",
            what=f"{'half of ' * (result.scale == HALF)}{steps} along a line: {ending}",
            why=result.why,
            values={
                "accepted": float(result.accepted),
                "horizon": float(self._horizon),
                "scale": result.scale,
                "gain": result.gain,
                "standard error": result.standard_error,
                "confidence": account.confidence,
                "forward passes": jumper.account.spent - account.spent,
            },
            seconds=time.perf_counter() - began,
        )
        why = self._too_late(step)
        if self.phase == "predict" and not why:
            if result.accepted:
                return [record, *self._predict(jumper, step)]
            entered = self._enter("correct", step, "half of the rejected movement is verified")
            jumper.begin(self._horizon, scale=HALF)
            return [record, *entered]
        jumper.end()
        return [record, *self._enter("full", step, why or "training continues after predictions")]

    def _enter(self, phase: Phase, step: int, why: str, *, times: int = 1) -> list[Record]:
        """Begin a phase and its formats."""
        changes_phase, self.phase = phase != self.phase, phase
        if self._jumper is None:
            self._end = None
        elif self.is_forward_only:
            self._end = step + self._window
        else:
            self._end = step + times * self._settings.phases.full_steps
        changes = self._formats.apply(phase, step=step + 1)
        begins = [self._record(step, why)] if changes_phase or times > 1 else []
        return [*begins, *changes]

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


def jump_length(longest: int, confidence: float) -> int:
    """Return how many steps a jump stands for: more if it is likelier to be accepted."""
    return max(min(SHORTEST_JUMP, longest), math.floor(longest * confidence**2))


def window_steps(settings: StrategySection, *, micro_batches: int) -> int:
    """Return the steps without a backward pass that one verification takes."""
    return math.ceil(settings.jumps.micro_batches / micro_batches)


def snapshot_interval(settings: StrategySection) -> int:
    """Return the steps between two snapshots: a full phase fills the history."""
    return max(1, settings.phases.full_steps // (SNAPSHOTS - 1))


def jump_budget(settings: StrategySection, *, steps: int, micro_batches: int) -> float:
    """Return the forward passes that the rejected jumps of a run may cost."""
    return settings.jumps.budget * steps * STEP_COST * micro_batches


def check_first_jump(settings: StrategySection, *, steps: int, micro_batches: int) -> None:
    """Raise if nothing can be predicted: the run is too short, or its budget too small."""
    full_steps = settings.phases.full_steps
    first = settings.warmup_steps(steps) + full_steps
    while first <= (FEWEST_SNAPSHOTS - 1) * snapshot_interval(settings):
        first += full_steps
    window = window_steps(settings, micro_batches=micro_batches)
    if first + window >= steps:
        raise ConfigError(
            f"strategy.preset=aggressive cannot try a jump before step {first}, which takes "
            f"{window} steps, got steps={steps}. Write steps={2 * (first + window)} or more, a "
            "shorter strategy.phases.warmup_steps or full_steps, or strategy.preset=balanced."
        )
    cost = attempt_cost(settings.jumps.micro_batches)
    budget = jump_budget(settings, steps=steps, micro_batches=micro_batches)
    if cost > budget:
        share = math.ceil(1000 * cost * settings.jumps.budget / budget) / 1000
        enough = math.ceil(cost * steps / budget)
        larger = f"strategy.jumps.budget={share:g} or more, " if share <= 1 else ""
        raise ConfigError(
            f"strategy.preset=aggressive cannot try a jump: one costs up to {cost:g} forward "
            f"passes, and strategy.jumps.budget allows {budget:.4g} in {steps} steps, got "
            f"strategy.jumps.budget={settings.jumps.budget:g}. Write {larger}steps={enough} or "
            "more, or strategy.preset=balanced."
        )
