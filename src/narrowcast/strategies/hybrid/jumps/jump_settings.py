"""What a jumper is told, and what it proposes."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.budget import STEP_COST, JumpBudget
from narrowcast.strategies.hybrid.jumps.correction import CorrectionSettings
from narrowcast.strategies.hybrid.jumps.history import HistorySettings
from narrowcast.strategies.hybrid.jumps.predictor import Predictor
from narrowcast.strategies.hybrid.jumps.verify import FEWEST_PAIRS, SCALES


@dataclass(frozen=True, kw_only=True)
class JumpSettings:
    """All that a jumper is told."""

    history: HistorySettings = field(default_factory=HistorySettings)
    budget: JumpBudget = field(default_factory=JumpBudget)
    """What it begins with."""
    correction: CorrectionSettings | None = field(default_factory=CorrectionSettings)
    """None leaves predictions as they are."""
    batches: int = FEWEST_PAIRS
    """Micro-batches that a jump is judged on."""
    scales: tuple[float, ...] = SCALES
    """Shares of the prediction that are tried, until one is accepted."""
    risk: float = 0.05
    """The chance that a jump is accepted which changes nothing."""
    step_cost: float = STEP_COST
    """What a training step costs, in forward passes of a micro-batch."""
    predictor_cost: float = 1.0
    """What the prediction of a line costs, in forward passes of a micro-batch; others are known in
    lines. For a million weights on a CPU it took as long as a forward pass of 300 to 600 rows:
    write more for smaller micro-batches, less for larger ones."""
    moments: Literal["keep", "reset"] = "keep"
    """What becomes of the optimizer's moments when a jump is accepted."""

    def __post_init__(self) -> None:
        if self.batches < FEWEST_PAIRS or not self.scales or not 0 < self.risk < 0.5:
            raise RecipeError(
                f"jumps judged on {self.batches} micro-batches at {len(self.scales)} scales with a "
                f"risk of {self.risk} were asked for; write batches={FEWEST_PAIRS} or more, one "
                "scale or more, and a risk between 0 and 0.5"
            )

    def attempt_cost(self, predictor: Predictor) -> float:
        """Return what an attempt costs at most, its prediction and the residual's included."""
        predictions = 2 * self.predictor_cost * predictor.cost
        return predictions + self.batches * (1 + len(self.scales))


@dataclass(frozen=True)
class Proposal:
    """A predicted movement, ready to be tried."""

    predictor: str
    step: int
    ahead_steps: int
    deltas: list[Tensor]
    corrections: list[float]
    """What was added to a factor of 1 on each tensor's delta."""
    features: tuple[float, ...]
    """Of the run, by which similar residuals are found."""
    confidence: float
