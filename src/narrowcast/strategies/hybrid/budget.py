"""What passes over held-out data may cost: a share of the run's training.

Costs are in forward passes of one micro-batch. A training step of one micro-batch costs three: a
forward pass, and a backward pass that costs two.
"""

import math
from dataclasses import asdict, dataclass, replace

from narrowcast.errors import ConfigError

STEP_COST = 3.0
"""Forward passes that a training step of one micro-batch costs (Kaplan et al. 2020)."""
MAX_REJECTIONS = 5
"""Rejected jumps in a row after which no further jump is tried."""
FEWEST_JUMPS = 3
"""Jumps that are tried before their acceptance rate decides."""


@dataclass(frozen=True, kw_only=True)
class ChoosingBudget:
    """What was spent on choosing among averages, and what is left."""

    share: float = 0.01
    """The largest cost of choosing, as a share of the training done so far."""
    step_cost: float = STEP_COST
    """Cost of a training step."""
    spent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                "readout_budget must be a share of the run's work above 0 and up to 1, got "
                f"{self.share}. Write a number such as 0.01."
            )

    def left(self, steps: int, *, part: float = 1.0) -> float:
        """Return what can be spent after so many steps, if only this part of it may be."""
        return max(0.0, part * self.share * steps * self.step_cost - self.spent)

    def after_spending(self, passes: float) -> "ChoosingBudget":
        """Return the budget after forward passes."""
        return replace(self, spent=self.spent + passes)


@dataclass(frozen=True, kw_only=True)
class JumpAccount:
    """Jumps so far: what they cost, and how many were accepted."""

    spent: float = 0.0
    tried: int = 0
    accepted: int = 0
    rejections: int = 0
    """Since the last one that was accepted."""

    @property
    def confidence(self) -> float:
        """Probability that the next jump is accepted: a half before the first one."""
        return (self.accepted + 1) / (self.tried + 2)

    def after_jump(self, *, cost: float, accepted: bool) -> "JumpAccount":
        """Return the account after a jump."""
        return JumpAccount(
            spent=self.spent + cost,
            tried=self.tried + 1,
            accepted=self.accepted + accepted,
            rejections=0 if accepted else self.rejections + 1,
        )

    def is_confident(self, threshold: float) -> bool:
        """Return whether the acceptance rate can still be as high as a threshold.

        The first jumps are always tried, then those within one standard deviation of the rate.
        """
        mean = self.confidence
        deviation = math.sqrt(mean * (1 - mean) / (self.tried + 3))
        return self.tried < FEWEST_JUMPS or mean + deviation >= threshold

    def to_json(self) -> dict[str, float]:
        """Return the account as plain data."""
        return asdict(self)
