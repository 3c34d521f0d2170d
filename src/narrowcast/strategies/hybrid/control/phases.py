"""The state machine of hybrid training: which phase is next, for how many steps, and why.

Pure: a state goes in, a state comes out. A trainer asks `next_decision` before a step, does what
`state.decision` says, and tells `after_outcome` how it went.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, final

from narrowcast.errors import RecipeError
from narrowcast.precision.plan.phases import PHASES, Phase
from narrowcast.strategies.hybrid.control.plain import restored, usable
from narrowcast.strategies.hybrid.control.recovery import (
    Continue,
    ForceFullPhase,
    IncreaseConfidenceThreshold,
    Level,
    RecoveryAction,
    ReducePredictRatio,
    recommended,
)
from narrowcast.strategies.hybrid.control.settings import PhaseSettings


@dataclass(frozen=True)
class Warmup:
    """Train as usual; nothing is learned of the run yet."""

    steps: int
    phase: ClassVar[Phase] = "warmup"


@dataclass(frozen=True)
class Full:
    """Train as usual, and let the predictors learn from it."""

    steps: int
    phase: ClassVar[Phase] = "full"


@dataclass(frozen=True)
class Predict:
    """Move the weights by a prediction, without a backward pass."""

    steps: int
    confidence: float
    fallback_loss: float | None
    """Above this loss the prediction is given up; None where no loss has been seen."""
    phase: ClassVar[Phase] = "predict"


@dataclass(frozen=True)
class Correct:
    """Compare what was predicted with what is, batch by batch, and repair."""

    steps: int
    max_correction: float
    phase: ClassVar[Phase] = "correct"


Decision = Warmup | Full | Predict | Correct
_DECISIONS: Mapping[Phase, type[Decision]] = {
    "warmup": Warmup,
    "full": Full,
    "predict": Predict,
    "correct": Correct,
}


class Transition(NamedTuple):
    """One row of the state machine."""

    before: Phase
    after: Phase
    when: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition("warmup", "full", "`warmup_steps` are done, or a Full is forced"),
    Transition("full", "full", "confidence is too low, or a Full is forced"),
    Transition("full", "predict", "after the first Full, confidence is high enough"),
    Transition("full", "correct", "only when forced"),
    Transition("predict", "correct", "the prediction is done, or it failed"),
    Transition("predict", "full", "a Full is forced, as by a Warning"),
    Transition("correct", "full", "confidence is too low, or it was the last prediction in a row"),
    Transition("correct", "predict", "confidence is high enough, and not too often in a row"),
)
"""All changes of phase there are."""

ALLOWED: Mapping[Phase, frozenset[Phase]] = {
    phase: frozenset(row.after for row in TRANSITIONS if row.before == phase) for phase in PHASES
}
"""Where each phase may go."""


@final
@dataclass(frozen=True, kw_only=True)
class PhaseState:
    """Where a run stands among its phases; part of what a checkpoint keeps."""

    step: int = 0
    """Steps done, predicted ones too."""
    decision: Decision = Warmup(0)
    """What is being done now."""
    remaining: int = 0
    """Steps left of it."""
    consecutive: int = 0
    """Predictions since ordinary training last had its turn."""
    full_done: bool = False
    """Whether the Full that follows the warm-up has been decided."""
    predict_ratio: float = 1.0
    """What is left of a prediction's length after a Caution; 1 again after one that succeeds."""
    threshold: float = 0.0
    """A confidence threshold that recovery raised above that of the settings."""

    @property
    def phase(self) -> Phase:
        """The phase of the decision in force."""
        return self.decision.phase

    @property
    def phase_step(self) -> int:
        """Steps done of the decision in force."""
        return self.decision.steps - self.remaining

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {**asdict(self), "decision": {"phase": self.phase, **asdict(self.decision)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PhaseState":
        """Return the state that `to_json` told."""
        said = dict(data["decision"])
        decision = restored(_DECISIONS[said.pop("phase")], said)
        return restored(cls, {**data, "decision": decision})


def computes_backward(phase: Phase) -> bool:
    """Say whether a phase has backward passes."""
    return phase in ("warmup", "full")


def uses_predictions(phase: Phase) -> bool:
    """Say whether a phase moves weights by a prediction."""
    return phase == "predict"


def predict_length(settings: PhaseSettings, *, confidence: float, consecutive: int) -> int:
    """Return how long a prediction may be: surer ones are longer, later ones in a row shorter."""
    most = settings.max_predict_steps
    wanted = math.floor(most * confidence**2) * (1 - min(0.1 * consecutive, 0.5))
    return min(max(math.floor(wanted), settings.min_predict_steps), most)


def next_decision(
    state: PhaseState, settings: PhaseSettings, *, confidence: float, losses: Sequence[float]
) -> PhaseState:
    """Return the state with the decision for the coming step: the one in force, or the next.

    `confidence` is the probability that a prediction would be accepted, `losses` the recent ones.
    """
    if state.remaining > 0:
        return state
    if state.step < settings.warmup_steps and not state.full_done:
        return _decided(state, Warmup(settings.warmup_steps - state.step))
    if state.phase == "predict":
        return _decided(state, Correct(settings.validation_samples, settings.max_correction))
    sure = confidence >= max(settings.confidence_threshold, state.threshold)
    if not (state.full_done and sure and state.consecutive < settings.max_consecutive):
        return _decided(state, Full(settings.full_steps))
    length = predict_length(settings, confidence=confidence, consecutive=state.consecutive)
    steps = max(1, math.floor(length * state.predict_ratio))
    fallback = _fallback_loss(losses, sigma=settings.fallback_sigma)
    decided = _decided(state, Predict(steps, confidence, fallback))
    return replace(decided, consecutive=state.consecutive + 1)


def after_outcome(
    state: PhaseState, settings: PhaseSettings, *, succeeded: bool, steps: int = 1
) -> PhaseState:
    """Return the state after so many steps of its decision.

    A failure ends the decision and lets ordinary training have its turn before the next prediction.
    """
    if not 1 <= steps <= state.remaining:
        raise RecipeError(
            f"{steps} steps were told of a {state.phase} phase that has {state.remaining} left; "
            "ask `next_decision` before a step, and tell at most `state.remaining`"
        )
    now = replace(state, step=state.step + steps, remaining=state.remaining - steps)
    if not succeeded:
        return replace(now, remaining=0, consecutive=settings.max_consecutive)
    done = state.phase == "predict" and now.remaining == 0
    return replace(now, predict_ratio=1.0) if done else now


def after_divergence(
    state: PhaseState,
    settings: PhaseSettings,
    *,
    level: Level,
    checkpoint_step: int | None = None,
) -> tuple[PhaseState, RecoveryAction]:
    """Return the state that a level of divergence leads to, and what the trainer has to do.

    A warm-up is already what a Warning asks for, so only Critical counts there.
    """
    action = recommended(level, full_steps=settings.full_steps, checkpoint_step=checkpoint_step)
    if state.phase == "warmup":
        return state, action if level == Level.CRITICAL else Continue()
    if level == Level.CRITICAL:
        # Whoever returns to a checkpoint trains as usual from there.
        return forced(state, Full(2 * settings.full_steps)), action
    return recovered(state, action), action


def recovered(state: PhaseState, action: RecoveryAction) -> PhaseState:
    """Return the state with an action's effect on phases; other effects are the trainer's."""
    match action:
        case ReducePredictRatio(ratio):
            return replace(state, predict_ratio=ratio)
        case ForceFullPhase(steps):
            return forced(state, Full(steps))
        case IncreaseConfidenceThreshold(threshold):
            return replace(state, threshold=max(threshold, state.threshold))
        case _:
            return state


def forced(state: PhaseState, decision: Decision) -> PhaseState:
    """Return the state with a decision from outside; refuse a change of phase there is none of."""
    if decision.phase not in ALLOWED[state.phase]:
        raise RecipeError(
            f"no phase goes from {state.phase} to {decision.phase}; "
            f"from {state.phase} write {' or '.join(sorted(ALLOWED[state.phase]))}"
        )
    if decision.steps < 1:
        raise RecipeError(
            f"a {decision.phase} phase of {decision.steps} steps was forced; write at least 1"
        )
    return _decided(state, decision)


def transition_table() -> str:
    """Return the state machine as a table in Markdown."""
    rows = [f"| {row.before} | {row.after} | {row.when} |" for row in TRANSITIONS]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows])


def _decided(state: PhaseState, decision: Decision) -> PhaseState:
    """Return the state with a new decision; ordinary training ends a row of predictions."""
    full = decision.phase == "full"
    return replace(
        state,
        decision=decision,
        remaining=decision.steps,
        consecutive=0 if full else state.consecutive,
        full_done=state.full_done or full,
    )


def _fallback_loss(losses: Sequence[float], *, sigma: float) -> float | None:
    finite = [loss for loss in losses if usable(loss)]
    if not finite:
        return None
    mean = math.fsum(finite) / len(finite)
    variance = math.fsum((loss - mean) ** 2 for loss in finite) / len(finite)
    return mean + sigma * math.sqrt(variance)
