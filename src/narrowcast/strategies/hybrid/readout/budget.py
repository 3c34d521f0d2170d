"""What choosing among read-outs may cost: a share of the run's training.

Costs are in forward passes of one micro-batch, as those of jumps are: a training step of one
micro-batch is three (forward once, backward twice).
"""

from dataclasses import dataclass, replace

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.budget import STEP_COST


@dataclass(frozen=True, kw_only=True)
class ChoosingBudget:
    """What was spent on choosing, and what may still be."""

    share: float = 0.01
    """The most that choosing may cost, as a part of the training done by then."""
    step_cost: float = STEP_COST
    """What a training step costs, in forward passes of a micro-batch."""
    spent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise RecipeError(
                f"a readout_budget of {self.share} was asked for; write the share of the run's "
                "work that choosing among read-outs may take, above 0 and up to 1, e.g. 0.01"
            )

    def left(self, steps: int, *, part: float = 1.0) -> float:
        """Return what may be spent after so many steps, if only this part of it all may be."""
        return max(0.0, part * self.share * steps * self.step_cost - self.spent)

    def after_spending(self, passes: float) -> "ChoosingBudget":
        """Return the budget after forward passes."""
        return replace(self, spent=self.spent + passes)
