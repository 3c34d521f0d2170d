"""What hybrid training did and what it cost: statistics of a run, folded over its events.

Costs are honest: a step is a forward and a backward pass, three forwards' worth; a verification is
a forward, a third of a step; predicted steps count for nothing here but what they were paid with.
Clock readings are left to the records: a checkpoint holds only what a resumed run has, too.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from narrowcast.precision.plan.phases import PHASES, Phase
from narrowcast.strategies.hybrid.control.confidence import Calibration
from narrowcast.strategies.hybrid.control.plain import restored
from narrowcast.strategies.hybrid.control.recovery import Level

FORWARDS_PER_STEP = 3
"""A backward pass costs about two forwards: Kaplan et al. 2020."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One step, trained or predicted."""

    phase: Phase
    loss: float
    precision: str
    """The policy it was computed in, as text."""
    backward: bool
    """Whether there was a backward pass."""
    forwards: int = 0
    """Forward passes beside that of the step's own training, as for verification."""
    confidence: float | None = None
    prediction_error: float | None = None
    """The relative error of a predicted loss."""


@dataclass(frozen=True, kw_only=True)
class JumpVerified:
    """A prediction that was compared with what held-out data say."""

    length: int
    accepted: bool
    score: float
    """Its raw score, by which acceptance is calibrated."""


@dataclass(frozen=True, kw_only=True)
class Diverged:
    """A level above normal was seen."""

    level: Level


@dataclass(frozen=True)
class MicroCorrected:
    """A prediction was corrected without a change of phase."""


Event = StepDone | JumpVerified | Diverged | MicroCorrected


def step_equivalents(*, gradient_steps: float, forwards: float) -> float:
    """Return what steps and further forwards cost together, in steps."""
    return gradient_steps + forwards / FORWARDS_PER_STEP


@final
@dataclass(frozen=True, kw_only=True)
class TrainingStatistics:
    """What happened in a run so far; part of what a checkpoint keeps."""

    target_loss: float | None = None
    """A loss whose first reaching is noted."""
    steps_by_phase: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    steps_by_precision: Mapping[str, int] = field(default_factory=dict)
    backward_steps: int = 0
    forwards: int = 0
    final_loss: float | None = None
    best_loss: float | None = None
    confidence_sum: float = 0.0
    confidence_count: int = 0
    error_sum: float = 0.0
    error_count: int = 0
    jumps: int = 0
    accepted_jumps: int = 0
    predicted_length: int = 0
    """Of all jumps together, accepted or not."""
    divergence_events: Mapping[str, int] = field(default_factory=dict)
    micro_corrections: int = 0
    target_reached_at: float | None = None
    """Step-equivalents spent when the target was first reached."""
    calibration: Calibration = field(default_factory=Calibration)

    def after(self, event: Event) -> "TrainingStatistics":
        """Return the statistics with one more event."""
        match event:
            case StepDone():
                return self._after_step(event)
            case JumpVerified(length=length, accepted=accepted, score=score):
                return replace(
                    self,
                    jumps=self.jumps + 1,
                    accepted_jumps=self.accepted_jumps + accepted,
                    predicted_length=self.predicted_length + length,
                    calibration=self.calibration.after(score, accepted=accepted),
                )
            case Diverged(level=level):
                name = level.name.lower()
                return replace(self, divergence_events=_one_more(self.divergence_events, name))
            case MicroCorrected():
                return replace(self, micro_corrections=self.micro_corrections + 1)

    def _after_step(self, step: StepDone) -> "TrainingStatistics":
        finite = math.isfinite(step.loss)
        losses = [
            each for each in (self.best_loss, step.loss if finite else None) if each is not None
        ]
        confident, checked = step.confidence is not None, step.prediction_error is not None
        now = replace(
            self,
            steps_by_phase=_one_more(self.steps_by_phase, step.phase),
            steps_by_precision=_one_more(self.steps_by_precision, step.precision),
            backward_steps=self.backward_steps + step.backward,
            forwards=self.forwards + step.forwards,
            final_loss=step.loss if finite else self.final_loss,
            best_loss=min(losses, default=None),
            confidence_sum=self.confidence_sum + (step.confidence or 0.0),
            confidence_count=self.confidence_count + confident,
            error_sum=self.error_sum + (step.prediction_error or 0.0),
            error_count=self.error_count + checked,
        )
        reached = finite and self.target_loss is not None and step.loss <= self.target_loss
        if reached and self.target_reached_at is None:
            return replace(now, target_reached_at=now.step_equivalents)
        return now

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(self.steps_by_phase.values())

    @property
    def backward_reduction_pct(self) -> float:
        """Steps without a backward pass, of a hundred; no saving by itself."""
        return 100 * (1 - self.backward_steps / self.total_steps) if self.total_steps else 0.0

    @property
    def step_equivalents(self) -> float:
        """What was computed, in ordinary steps."""
        return step_equivalents(gradient_steps=self.backward_steps, forwards=self.forwards)

    @property
    def forward_equivalents(self) -> float:
        """What was computed, in forward passes."""
        return FORWARDS_PER_STEP * self.backward_steps + self.forwards

    @property
    def acceptance(self) -> float | None:
        """The share of jumps that held-out data confirmed."""
        return self.accepted_jumps / self.jumps if self.jumps else None

    @property
    def average_predict_length(self) -> float | None:
        """Steps of a jump."""
        return self.predicted_length / self.jumps if self.jumps else None

    @property
    def average_confidence(self) -> float | None:
        """How sure of jumps it was on average."""
        return self.confidence_sum / self.confidence_count if self.confidence_count else None

    @property
    def prediction_accuracy(self) -> float | None:
        """One less the mean relative error of predicted losses, and not below zero."""
        return max(0.0, 1 - self.error_sum / self.error_count) if self.error_count else None

    def loss_gap_pct(self, reference_loss: float) -> float | None:
        """Return how much worse the final loss is than that of ordinary training, of a hundred."""
        if self.final_loss is None or reference_loss == 0:
            return None
        return 100 * (self.final_loss - reference_loss) / abs(reference_loss)

    def to_json(self, *, reference_loss: float | None = None) -> dict[str, Any]:
        """Return everything as plain data: what was counted, and what it comes to."""
        gap = None if reference_loss is None else self.loss_gap_pct(reference_loss)
        return {
            **asdict(self),
            "calibration": self.calibration.to_json(),
            "derived": {
                "total_steps": self.total_steps,
                "backward_reduction_pct": self.backward_reduction_pct,
                "step_equivalents": self.step_equivalents,
                "forward_equivalents": self.forward_equivalents,
                "acceptance": self.acceptance,
                "average_predict_length": self.average_predict_length,
                "average_confidence": self.average_confidence,
                "prediction_accuracy": self.prediction_accuracy,
                "loss_gap_pct": gap,
                "brier": self.calibration.brier,
                "expected_calibration_error": self.calibration.expected_error,
                "reliability": [row._asdict() for row in self.calibration.table()],
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TrainingStatistics":
        """Return the statistics that `to_json` told; what it derived is derived again."""
        counted = {name: value for name, value in data.items() if name != "derived"}
        calibration = Calibration.from_json(counted["calibration"])
        return restored(cls, {**counted, "calibration": calibration})


def _one_more(counts: Mapping[str, int], name: str) -> dict[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}
