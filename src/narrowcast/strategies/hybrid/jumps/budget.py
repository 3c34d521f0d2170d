"""What jumps may cost: a share of the run, and an end where none is accepted.

Costs are in forward passes of one micro-batch: a training step of one micro-batch is three (forward
once, backward twice).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.errors import RecipeError

STEP_COST = 3.0
"""Forward passes that a training step of one micro-batch costs."""


@dataclass(frozen=True, kw_only=True)
class JumpBudget:
    """What was spent, and what may still be."""

    share: float = 0.01
    """The most that verification and prediction may cost, as a part of the run's training."""
    planned: float | None = None
    """What the whole run's training costs, if known; else the share is of what is done so far."""
    most_rejections: int = 5
    """Rejections in a row after which no further jump is tried."""
    trained: float = 0.0
    spent: float = 0.0
    """On jumps and lessons."""
    taught: float = 0.0
    """On lessons to predictors alone: at most half, or nothing would be left to try them with."""
    tried: int = 0
    accepted: int = 0
    rejections: int = 0
    """In a row, until now."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or self.most_rejections < 1:
            raise RecipeError(
                f"a budget of share={self.share} and most_rejections={self.most_rejections} was "
                "asked for; write a share from 0 to 1, and 1 rejection or more"
            )

    @property
    def switched_off(self) -> bool:
        """Whether too many jumps in a row were rejected."""
        return self.rejections >= self.most_rejections

    @property
    def left(self) -> float:
        """What may be spent now."""
        return max(0.0, self._whole - self.spent)

    @property
    def _whole(self) -> float:
        return self.share * (self.trained if self.planned is None else self.planned)

    def may_try(self, cost: float) -> bool:
        """Say whether something of this cost fits, and jumps are still tried at all."""
        return not self.switched_off and cost <= self.left

    def may_teach(self, cost: float) -> bool:
        """Say whether a lesson to a predictor fits."""
        return self.may_try(cost) and self.taught + cost <= self._whole / 2

    def refusal(self, cost: float) -> str:
        """Say why something is not tried; nothing where it may be."""
        if self.switched_off:
            return f"{self.rejections} jumps in a row were rejected, and no more are tried"
        if not self.may_try(cost):
            return f"it would cost {cost:g} forward passes, and {self.left:.4g} are left for jumps"
        return ""

    def after_steps(self, steps: int, *, step_cost: float = STEP_COST) -> "JumpBudget":
        """Return the budget after training steps."""
        return replace(self, trained=self.trained + steps * step_cost)

    def after_spending(self, cost: float) -> "JumpBudget":
        """Return the budget after passes, or a prediction."""
        return replace(self, spent=self.spent + cost)

    def after_lesson(self, cost: float) -> "JumpBudget":
        """Return the budget after a predictor has learnt."""
        return replace(self, spent=self.spent + cost, taught=self.taught + cost)

    def after_jump(self, *, accepted: bool) -> "JumpBudget":
        """Return the budget after a jump was judged."""
        return replace(
            self,
            tried=self.tried + 1,
            accepted=self.accepted + accepted,
            rejections=0 if accepted else self.rejections + 1,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was trained, spent and tried, as plain values."""
        return {name: getattr(self, name) for name in _ACCOUNT}

    def restored(self, state: Mapping[str, Any]) -> "JumpBudget":
        """Return this budget with a saved account; a run that is extended may spend more."""
        return replace(self, **{name: state[name] for name in _ACCOUNT})


_ACCOUNT = ("trained", "spent", "taught", "tried", "accepted", "rejections")
