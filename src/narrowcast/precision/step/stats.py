"""What a run has been through, in numbers."""

from dataclasses import dataclass, field
from typing import Any

from narrowcast.precision.step.outcome import Outcome


@dataclass(kw_only=True)
class Stats:
    """Counts since the beginning of the run; they survive a resume."""

    steps: int = 0
    """Steps tried."""
    skipped: int = 0
    overflows_in_a_row: int = 0
    overflows_at_floor: int = 0
    """In a row, with the scale as small as it may be."""
    bad_module: str = ""
    """Where the last overflow was nearest the loss."""
    grad_norm: float = 0.0
    """Of the last step that was applied."""
    average_grad_norm: float = 0.0
    """Mean over all steps that were applied, before clipping."""
    lost_updates: float | None = None
    """The last measurement."""
    scale_history: list[tuple[int, float]] = field(default_factory=list)
    """The scale at each step where it changed, the first included."""
    scale_increases: int = 0
    """Steps after which the loss scale grew."""
    scale_decreases: int = 0
    """Steps after which the loss scale shrank."""
    current_scale: float = 1.0
    """The loss scale of the next step; 1 without one. Of several, the first."""
    bytes: dict[str, int] = field(default_factory=dict)
    """What is held now, by role."""

    @property
    def applied(self) -> int:
        """Steps that moved the weights."""
        return self.steps - self.skipped

    @property
    def overflow_rate(self) -> float:
        """Skipped over tried."""
        return self.skipped / self.steps if self.steps else 0.0

    def count(self, outcome: Outcome) -> None:
        """Take in one step."""
        self.steps += 1
        if not self.scale_history or self.scale_history[-1][1] != outcome.loss_scale:
            self.scale_history.append((self.steps, outcome.loss_scale))
        self.scale_increases += outcome.next_scale > outcome.loss_scale
        self.scale_decreases += outcome.next_scale < outcome.loss_scale
        if outcome.lost_updates is not None:
            self.lost_updates = outcome.lost_updates
        if outcome.applied:
            self.overflows_in_a_row = self.overflows_at_floor = 0
            self.grad_norm = outcome.grad_norm
            self.average_grad_norm += (self.grad_norm - self.average_grad_norm) / self.applied
            return
        self.skipped += 1
        self.bad_module = outcome.bad_module
        self.overflows_in_a_row += 1
        if outcome.at_floor:
            self.overflows_at_floor += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "overflows_in_a_row": self.overflows_in_a_row,
            "overflows_at_floor": self.overflows_at_floor,
            "bad_module": self.bad_module,
            "grad_norm": self.grad_norm,
            "average_grad_norm": self.average_grad_norm,
            "lost_updates": self.lost_updates,
            "scale_increases": self.scale_increases,
            "scale_decreases": self.scale_decreases,
            "scale_history": [list(pair) for pair in self.scale_history],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Stats":
        """Return counts that were saved."""
        history = [(int(step), float(scale)) for step, scale in state["scale_history"]]
        return cls(**{**state, "scale_history": history})
