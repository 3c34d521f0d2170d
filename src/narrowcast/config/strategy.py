"""The section of a recipe that says how a run gets by with fewer steps: hybrid training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from narrowcast.config.phases import PolicyText
from narrowcast.config.section import Conflict, Section, Steps

PresetName = Literal["conservative", "balanced", "aggressive"]
PhaseName = Literal["warmup", "full", "predict", "correct"]

WARMUP: dict[PresetName, int] = {"conservative": 200, "balanced": 100, "aggressive": 50}
"""Steps of the warm-up, where a recipe does not say."""
SHORTEST = 3
"""It takes a third of a short run at most."""
MOST_AVERAGES = 8
"""Averages of the weights, each a copy of them all."""
LONGEST_STRETCH = 10.0
"""Times the steps that a learning rate is planned for; beyond it the rate hardly falls."""


class LookaheadSection(Section):
    """The point ahead that gradients are taken at."""

    enabled: bool | None = Field(
        default=None,
        description=(
            "take gradients at a point ahead of the weights; none: as in the preset "
            "(conservative: off)"
        ),
    )
    interpolation: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="position of that point between the newest weights (0) and their average (1)",
    )
    rate: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="fraction by which the average moves to the newest weights per step",
    )
    storage: Literal["fp32", "bf16"] = Field(
        default="fp32", description="format of the extra value stored per weight"
    )


class ReadoutSection(Section):
    """The averages of the weights, the best of which is what the run returns."""

    half_lives: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        default=(0.015, 0.05),
        max_length=MOST_AVERAGES,
        description="half-lives of the weight averages, as fractions of the run; []: no averages",
    )
    every: Steps | None = Field(
        default=None,
        description=(
            "steps between updates of the averages; none: a tenth of the shortest half-life"
        ),
    )
    budget: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description=(
            "fraction of the run's compute that choosing among the averages may use, beyond one "
            "held-out batch each"
        ),
    )


class PhasesSection(Section):
    """How long each phase lasts, and when weights are predicted."""

    warmup_steps: Steps | None = Field(
        default=None,
        description=(
            "steps before the first prediction and, if set, before lookahead starts; none: as in "
            "the preset"
        ),
    )
    full_steps: Steps = Field(default=15, description="training steps between predictions")
    max_predict_steps: Steps = Field(
        default=80, description="maximum number of steps that one prediction looks ahead"
    )
    confidence_threshold: float = Field(
        default=0.75,
        gt=0,
        lt=1,
        description="minimum estimated probability of acceptance for a prediction to be tried",
    )
    divergence_sigma: float = Field(
        default=3.5,
        gt=0,
        le=100,
        description="rise of the loss that counts as divergence, in standard deviations",
    )


class JumpsSection(Section):
    """Predictions of the weights along a line, kept only if the loss of eight batches falls."""

    micro_batches: int = Field(
        default=8,
        ge=8,
        le=1024,
        description="micro-batches that verify a prediction, with present and predicted weights",
    )
    budget: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="fraction of the run's compute that rejected predictions may use",
    )


class StrategySection(Section):
    """How the run gets by with fewer steps; `strategy: hybrid` alone is short for its name."""

    name: Literal["none", "hybrid"] = Field(
        default="none", description="none: plain training; hybrid: predictive training"
    )
    enabled: bool = Field(default=True, description="false: plain training, bit-identical")
    preset: PresetName = Field(
        default="balanced",
        description="conservative: weight averages; balanced: and lookahead; aggressive: and "
        "predictions",
    )
    lr_horizon: float = Field(
        default=1.4,
        ge=1,
        le=LONGEST_STRETCH,
        description="length of the learning rate schedule as a multiple of steps",
    )
    baseline: bool = Field(
        default=False, description="train a plain run first for comparison, which doubles the time"
    )
    precision: Literal["policy", "recommended", "conservative", "aggressive"] = Field(
        default="policy",
        description=(
            "precision per phase: policy uses precision.policy in all; recommended uses fp32, "
            "with bf16 for predictions; or conservative, aggressive"
        ),
    )
    policies: dict[PhaseName, PolicyText] = Field(
        default_factory=dict,
        max_length=4,
        description="policy per phase, overriding strategy.precision",
    )
    lookahead: LookaheadSection = Field(
        default_factory=LookaheadSection, description="where gradients are taken"
    )
    readout: ReadoutSection = Field(
        default_factory=ReadoutSection, description="averages of the weights"
    )
    phases: PhasesSection = Field(default_factory=PhasesSection, description="length of the phases")
    jumps: JumpsSection = Field(
        default_factory=JumpsSection, description="predictions of the weights"
    )

    @property
    def is_hybrid(self) -> bool:
        """Whether anything is done but plain training."""
        return self.name == "hybrid" and self.enabled

    @property
    def has_lookahead(self) -> bool:
        """Whether gradients are taken at a point ahead."""
        requested = self.lookahead.enabled
        return self.is_hybrid and (
            self.preset != "conservative" if requested is None else requested
        )

    @property
    def lookahead_after(self) -> int:
        """Steps before lookahead begins; plain steps before it cost more than they gave."""
        return self.phases.warmup_steps or 0

    def warmup_steps(self, steps: int) -> int:
        """Return the steps of a run before anything is predicted."""
        if self.phases.warmup_steps is not None:
            return self.phases.warmup_steps
        return min(WARMUP[self.preset], max(1, steps // SHORTEST))

    @property
    def has_jumps(self) -> bool:
        return self.is_hybrid and self.preset == "aggressive"

    @property
    def has_baseline(self) -> bool:
        """Whether the plain run is trained first."""
        return self.is_hybrid and self.baseline

    @property
    def has_phase_policies(self) -> bool:
        return self.is_hybrid and (self.precision != "policy" or bool(self.policies))

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that have no effect."""
        if self.name == "hybrid":
            if self.enabled:
                yield from self._unused_by_jumps()
                yield from self._unused_by_others()
            return
        for key, field in type(self).model_fields.items():
            default = field.get_default(call_default_factory=True)
            if key not in ("name", "enabled") and getattr(self, key) != default:
                yield (key, "name"), f"{key} needs hybrid training. Write strategy=hybrid too"

    def _unused_by_jumps(self) -> Iterator[Conflict]:
        """Yield the settings of jumps in a preset that has none."""
        if self.has_jumps:
            return
        fix = "Write strategy.preset=aggressive too, or leave"
        if self.jumps != JumpsSection():
            yield ("jumps", "preset"), f"only the aggressive preset makes jumps. {fix} jumps out"
        for key in ("full_steps", "max_predict_steps", "confidence_threshold", "divergence_sigma"):
            if getattr(self.phases, key) != PhasesSection.model_fields[key].default:
                text = f"only the aggressive preset has phases that use {key}. {fix} {key} out"
                yield (f"phases.{key}", "preset"), text
        for phase in sorted({"predict", "correct"} & set(self.policies)):
            text = f"only the aggressive preset has a phase {phase}. {fix} policies.{phase} out"
            yield (f"policies.{phase}", "preset"), text

    def _unused_by_others(self) -> Iterator[Conflict]:
        """Yield the settings of what this strategy does not have, jumps left aside."""
        switched_off = self.lookahead.enabled is False
        if not (self.has_lookahead or switched_off or self.lookahead == LookaheadSection()):
            text = (
                "the conservative preset does not use lookahead. Write "
                "strategy.lookahead.enabled=true too, or leave lookahead out"
            )
            yield ("lookahead", "preset"), text
        starts_something = self.has_lookahead or self.has_jumps or self.has_phase_policies
        if self.phases.warmup_steps is not None and not starts_something:
            text = (
                "warmup_steps has no effect in the conservative preset. Leave it out, or write "
                "strategy.lookahead.enabled=true too"
            )
            yield ("phases.warmup_steps", "preset"), text
        for key in ("every", "budget"):
            default = ReadoutSection.model_fields[key].default
            if not self.readout.half_lives and getattr(self.readout, key) != default:
                text = f"{key} needs at least one average. Leave {key} out, or set half_lives"
                yield (f"readout.{key}", "readout.half_lives"), text
