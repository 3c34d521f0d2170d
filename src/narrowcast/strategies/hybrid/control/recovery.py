"""How bad it is, and what is done about it: levels of divergence and actions of recovery."""

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, ClassVar


class Level(IntEnum):
    """How far a run is from healthy; levels are compared."""

    NORMAL = 0
    CAUTION = 1
    WARNING = 2
    CRITICAL = 3


@dataclass(frozen=True)
class Continue:
    """Go on as planned."""

    can_continue: ClassVar[bool] = True


@dataclass(frozen=True)
class ReducePredictRatio:
    """Go on, with the next prediction this much shorter."""

    ratio: float
    can_continue: ClassVar[bool] = True


@dataclass(frozen=True)
class ForceFullPhase:
    """Go on, with so many steps of ordinary training from now."""

    steps: int
    can_continue: ClassVar[bool] = True


@dataclass(frozen=True)
class IncreaseConfidenceThreshold:
    """Go on, and predict only where it is surer than before."""

    threshold: float
    can_continue: ClassVar[bool] = True


@dataclass(frozen=True)
class SkipBatch:
    """Go on with the next batch; this one changes nothing."""

    can_continue: ClassVar[bool] = True


@dataclass(frozen=True)
class ResetPredictor:
    """Go on with predictors that have forgotten what they learned."""

    can_continue: ClassVar[bool] = True


@dataclass(frozen=True)
class RollbackAndRetry:
    """Return to the weights of an earlier step and train again from there, more slowly.

    What is in memory now cannot go on.
    """

    checkpoint_step: int
    lr_factor: float = 0.5
    can_continue: ClassVar[bool] = False


@dataclass(frozen=True)
class Abort:
    """End the run: there is nothing to return to."""

    reason: str
    can_continue: ClassVar[bool] = False


RecoveryAction = (
    Continue
    | ReducePredictRatio
    | ForceFullPhase
    | IncreaseConfidenceThreshold
    | SkipBatch
    | ResetPredictor
    | RollbackAndRetry
    | Abort
)
"""What a level of divergence asks for: one of these, and nothing else."""


def recommended(
    level: Level, *, full_steps: int, checkpoint_step: int | None = None
) -> RecoveryAction:
    """Return what a level asks for; `checkpoint_step` is the last state there is to return to."""
    match level:
        case Level.NORMAL:
            return Continue()
        case Level.CAUTION:
            return ReducePredictRatio(0.5)
        case Level.WARNING:
            return ForceFullPhase(2 * full_steps)
        case Level.CRITICAL if checkpoint_step is not None:
            return RollbackAndRetry(checkpoint_step)
        case _:
            return Abort("the run diverged before its first checkpoint")


def told(action: RecoveryAction) -> dict[str, Any]:
    """Return an action as a record tells it: its name, whether the run goes on, and its numbers."""
    return {
        "action": type(action).__name__,
        "can_continue": action.can_continue,
        **asdict(action),
    }
