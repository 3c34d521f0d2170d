"""The sections every recipe has, as strict frozen models: name, type, default and one line each."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from narrowcast.config.limits import (
    LARGEST_FP32,
    LARGEST_INDEX,
    LARGEST_RATE,
    LARGEST_SCALE,
    MOST_ENTRIES,
    MOST_MICRO_BATCHES,
    MOST_OVERRIDES,
    MOST_STEPS,
    SMALLEST_SCALE,
)
from narrowcast.config.phases import PolicyText, Schedule
from narrowcast.config.section import Section, check_conflicts

Piece = Literal["loss", "gelu", "layer_norm", "mask", "rms_norm", "rotary", "swiglu"]
Fuse = Literal["auto", "none"] | Annotated[tuple[Piece, ...], Field(max_length=MOST_ENTRIES)]
OfSequences = Literal[
    "genome_annotation", "variant_effect", "protein_function", "generation", "domain_adaptation"
]
TaskName = Literal[OfSequences, "pretrain", "sft", "lora", "rl_fp16", "forecast", "decompose"]
OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop", "adafactor"]

OBEYED_BY: dict[str, frozenset[str]] = {
    "adamw": frozenset({"betas", "eps", "fused"}),
    "adam": frozenset({"betas", "eps", "fused"}),
    "sgd": frozenset({"momentum", "fused"}),
    "rmsprop": frozenset({"momentum", "eps"}),
    "adafactor": frozenset(),
}
"""Settings beyond `lr` and `weight_decay` that each torch optimizer reads."""


def _power_of_two(value: float) -> float:
    """Refuse a factor that would not scale exactly."""
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        raise ValueError(f"only powers of two scale exactly; write {math.ldexp(0.5, exponent):g}")
    return value


PowerOfTwo = Annotated[float, AfterValidator(_power_of_two)]
Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """The torch optimizer; the defaults are torch's for AdamW."""

    name: OptimizerName = Field(default="adamw", description="torch optimizer")
    lr: float = Field(
        default=1e-3, ge=0, le=LARGEST_RATE, description="learning rate at its highest"
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        le=LARGEST_RATE,
        description="weight decay on parameters of two or more dimensions",
    )
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.999), description="decay of the two moments (adam, adamw)"
    )
    eps: float = Field(default=1e-8, gt=0, le=LARGEST_RATE, description="added to the denominator")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum (sgd, rmsprop)")
    fused: bool | None = Field(
        default=None, description="one kernel for all parameters; none: where the device has it"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a setting the chosen optimizer would ignore."""
        defaults = type(self).model_fields
        check_conflicts(
            [
                ((key, "name"), f"{self.name} has no {key}; leave {key} out, or choose {takers}")
                for key in ("betas", "eps", "momentum", "fused")
                if key not in OBEYED_BY[self.name]
                and getattr(self, key) not in (defaults[key].default, False)
                and (takers := " or ".join(name for name in OBEYED_BY if key in OBEYED_BY[name]))
            ]
        )
        return self


class LrScheduleSection(Section):
    """How the learning rate moves over the run."""

    name: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="course of the learning rate after the warmup"
    )
    warmup: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="steps over which lr rises to its highest"
    )
    warmup_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the same as a share of all steps, rounded up, instead of warmup",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of lr left when the run is over (cosine, linear)",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse an end value for a schedule that does not fall."""
        if self.name == "constant" and self.min_lr_ratio not in (0.0, 1.0):
            text = (
                "a constant schedule does not decay; leave min_lr_ratio out, or choose cosine "
                "or linear"
            )
            check_conflicts([(("min_lr_ratio", "name"), text)])
        if self.warmup and self.warmup_ratio:
            text = "warmup says it in steps already; leave warmup_ratio out, or warmup"
            check_conflicts([(("warmup_ratio", "warmup"), text)])
        return self

    @property
    def depends_on_steps(self) -> bool:
        """Whether the learning rate of a step depends on how many there are."""
        return self.name != "constant" or self.warmup_ratio > 0

    def warmup_steps(self, steps: int) -> int:
        """Return how many of a run's steps the learning rate rises over."""
        return self.warmup or math.ceil(steps * self.warmup_ratio)


class EmaSection(Section):
    """The moving average of the weights."""

    decay: float | None = Field(
        default=None, ge=0, lt=1, description="share of the average kept a step; none: no average"
    )


class LossScaleSection(Section):
    """The factor on the loss that lifts small gradients into the range of a narrow format."""

    init_scale: float = Field(
        default=65536.0,
        ge=SMALLEST_SCALE,
        le=LARGEST_SCALE,
        description="scale of the first step",
    )
    growth_factor: PowerOfTwo = Field(
        default=2.0, ge=2, le=LARGEST_SCALE, description="factor after growth_interval calm steps"
    )
    backoff_factor: PowerOfTwo = Field(
        default=0.5, gt=0, lt=1, description="factor after an overflow"
    )
    growth_interval: int = Field(
        default=2000, ge=1, le=MOST_STEPS, description="calm steps before it grows"
    )
    min_scale: float = Field(
        default=1.0, ge=SMALLEST_SCALE, le=LARGEST_SCALE, description="the floor, 2**-24 or more"
    )
    max_scale: float = Field(
        default=262144.0, ge=SMALLEST_SCALE, le=LARGEST_SCALE, description="the ceiling"
    )
    hysteresis: int = Field(
        default=1, ge=1, le=MOST_STEPS, description="overflows in a row before it backs off"
    )
    dynamic: bool = Field(default=True, description="false: the scale stays at init_scale")
    max_skipped_steps: int = Field(
        default=50,
        ge=1,
        le=MOST_STEPS,
        description="overflows in a row at the floor before giving up",
    )
    scale_groups: tuple[str, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="globs of modules that get a scale of their own",
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        """Refuse bounds that exclude each other or the first scale."""
        low, first, high = self.min_scale, self.init_scale, self.max_scale
        if low > high:
            text = f"min_scale {low:g} is above max_scale {high:g}; lower one, or raise the other"
            check_conflicts([(("min_scale", "max_scale"), text)])
        if first > high:
            text = (
                f"init_scale {first:g} is above max_scale {high:g}; "
                f"write init_scale={high:g}, or raise max_scale"
            )
            check_conflicts([(("init_scale", "max_scale"), text)])
        if first < low:
            text = (
                f"init_scale {first:g} is below min_scale {low:g}; "
                f"write init_scale={low:g}, or lower min_scale"
            )
            check_conflicts([(("init_scale", "min_scale"), text)])
        return self


class AdaptSection(Section):
    """When modules get a wider format than the policy's, and when they return."""

    enabled: bool = Field(
        default=False, description="widen modules that overflow, saturate or lose their gradients"
    )
    max_fraction: float = Field(
        default=0.25, ge=0, le=1, description="share of modules widened at once"
    )
    cooldown: int = Field(
        default=100, ge=1, le=MOST_STEPS, description="steps between two changes of a module"
    )
    calm_steps: int = Field(
        default=1000, ge=1, le=MOST_STEPS, description="steps without trouble before it returns"
    )
    overflows: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="overflows in a row that widen the whole policy, until it is calm; 0: never",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse limits on changes that are never made; `enabled: false` switches all of it off."""
        if self.enabled or self.overflows or "enabled" in self.model_fields_set:
            return self
        check_conflicts(
            [
                ((key,), f"no module is widened; write adapt.enabled=true too, or leave {key} out")
                for key in ("max_fraction", "cooldown", "calm_steps")
                if getattr(self, key) != type(self).model_fields[key].default
            ]
        )
        return self


class PrecisionSection(Section):
    """Which formats the run computes and keeps its numbers in."""

    policy: PolicyText = Field(
        default="default", min_length=1, description="name of a preset, or the text of a policy"
    )
    overrides: dict[str, PolicyText] = Field(
        default_factory=dict,
        max_length=MOST_OVERRIDES,
        description="module glob: policy for the modules it matches",
    )
    emulate: bool | None = Field(
        default=None,
        description="none: where the machine lacks the format; true: always; false: refuse instead",
    )
    skip_slow_fp8: bool = Field(
        default=True,
        description="keep a layer in bf16 where fp8 gains nothing, as measured on this GPU",
    )
    loss_scale: LossScaleSection = Field(
        default_factory=LossScaleSection, description="the factor on the loss"
    )
    adapt: AdaptSection = Field(
        default_factory=AdaptSection, description="formats that follow what tensors show"
    )
    schedule: Schedule = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="phases of the run, each {policy, overrides, until}; none: one",
    )
    fuse: Fuse = Field(
        default="auto",
        description="pieces computed as one where the model is known to have them: auto, none, "
        "or some of loss, gelu, layer_norm, mask, rms_norm, rotary, swiglu",
    )
    task: TaskName | None = Field(
        default=None,
        description="what is trained: chooses defaults here, of clip_norm and of memory",
    )


class CheckpointSection(Section):
    """When the state of the run is saved."""

    every: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="steps between; 0: at the end and on signals",
    )
    keep: int = Field(
        default=2, ge=1, le=MOST_STEPS, description="checkpoints kept; older ones are deleted"
    )
    background: bool = Field(
        default=False, description="a thread writes them, and training waits for the copy alone"
    )


class EvalSection(Section):
    """When the model is evaluated."""

    every: int = Field(default=0, ge=0, le=MOST_STEPS, description="steps between; 0: at the end")
    patience: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="evaluations in a row without improvement that end the run; 0: any number",
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST_FP32,
        description="by how much the first metric must be better to count as improved",
    )
    keep_best: bool = Field(
        default=False, description="end with the weights of the best evaluation, not with the last"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse patience without evaluations to be patient with, and a measure for none."""
        if self.patience and not self.every:
            text = "it is evaluated at its end only; write eval.every=100, or leave patience out"
            check_conflicts([(("patience", "every"), text)])
        if self.min_delta and not self.patience:
            text = "nothing is ended for want of it; write eval.patience=3, or leave min_delta out"
            check_conflicts([(("min_delta", "patience"), text)])
        return self


class HealthSection(Section):
    """What is looked at beside the training."""

    every: int = Field(
        default=50,
        ge=0,
        le=MOST_STEPS,
        description="steps between two readings of what tensors lose to their formats; 0: none",
    )
    diagnose: bool = Field(
        default=True,
        description="replay a step that is not finite, to name where that came from",
    )


class FaultSection(Section):
    """A number put in place of another, on purpose, for the passes of one micro-batch."""

    step: int = Field(ge=1, le=MOST_STEPS, description="the step it is put into", examples=[40])
    module: str = Field(
        description="name of a module, or a glob that matches exactly one",
        examples=["blocks.1.mlp.up"],
    )
    role: Literal["input", "weight", "output", "grad_output", "grad_weight"] = Field(
        description="the tensor it is put into"
    )
    value: Literal["inf", "nan", "large", "bit-flip"] = Field(description="what is put there")
    micro_batch: int = Field(
        default=1,
        ge=1,
        le=MOST_MICRO_BATCHES,
        description="the micro-batch of the step",
        examples=[1],
    )
    index: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INDEX,
        description="which number of the tensor; none: chosen by the seed",
        examples=[17],
    )
