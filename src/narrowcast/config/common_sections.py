"""The sections every recipe has, as strict frozen models: name, type, default and one line each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from narrowcast.config.limits import (
    LARGEST_FP32,
    LARGEST_INDEX,
    LARGEST_RATE,
    LARGEST_SCALE,
    MOST_ENTRIES,
    MOST_MICRO_BATCHES,
    MOST_OVERRIDES,
    MOST_RANKS,
    MOST_RESTARTS,
    MOST_SECONDS,
    SMALLEST_SCALE,
)
from narrowcast.config.phases import PhaseSection, PolicyText, check_ends
from narrowcast.config.section import Conflict, Section, Steps, StepsOrZero

Piece = Literal["loss", "gelu", "layer_norm", "mask", "rms_norm", "rotary", "swiglu"]
Fuse = Literal["auto", "none"] | Annotated[tuple[Piece, ...], Field(max_length=MOST_ENTRIES)]
OfSequences = Literal[
    "genome_annotation",
    "variant_effect",
    "protein_function",
    "generation",
    "domain_adaptation",
    "classify",
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
    """Raise for a factor that would not scale exactly."""
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        raise ValueError(f"must be a power of two. Write {math.ldexp(0.5, exponent):g}")
    return value


PowerOfTwo = Annotated[float, AfterValidator(_power_of_two)]
Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """The torch optimizer; the defaults are torch's for AdamW."""

    name: OptimizerName = Field(default="adamw", description="torch optimizer")
    lr: float = Field(default=1e-3, ge=0, le=LARGEST_RATE, description="peak learning rate")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        le=LARGEST_RATE,
        description="weight decay of parameters with two or more dimensions",
    )
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.999), description="decay rates of the two moments (adam, adamw)"
    )
    eps: float = Field(
        default=1e-8,
        gt=0,
        le=LARGEST_RATE,
        description="term added to the denominator (adam, adamw, rmsprop)",
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum (sgd, rmsprop)")
    fused: bool | None = Field(
        default=None,
        description="use torch's fused optimizer kernel; none: if the device supports it",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that the chosen optimizer would ignore."""
        for key in ("betas", "eps", "momentum", "fused"):
            default = type(self).model_fields[key].default
            if key not in OBEYED_BY[self.name] and getattr(self, key) not in (default, False):
                takers = " or ".join(name for name in OBEYED_BY if key in OBEYED_BY[name])
                yield (
                    (key, "name"),
                    f"{self.name} has no {key}. Leave {key} out, or choose {takers}",
                )


class LrScheduleSection(Section):
    """How the learning rate moves over the run."""

    name: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="shape of the learning rate schedule after warmup"
    )
    warmup: StepsOrZero = Field(
        default=0, description="steps over which the learning rate rises to its peak"
    )
    warmup_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="warmup as a fraction of all steps, rounded up; use instead of warmup",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="learning rate at the last step as a fraction of lr (cosine, linear)",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield an end value that the schedule ignores, and a second warmup."""
        if self.name == "constant" and self.min_lr_ratio not in (0.0, 1.0):
            text = (
                "min_lr_ratio has no effect in a constant schedule. Leave it out, or choose "
                "cosine or linear"
            )
            yield ("min_lr_ratio", "name"), text
        if self.warmup and self.warmup_ratio:
            yield ("warmup_ratio", "warmup"), "set warmup or warmup_ratio, not both"

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
        default=None,
        ge=0,
        lt=1,
        description="decay of the moving average per step; none: no average",
    )


class LossScaleSection(Section):
    """The factor on the loss that lifts small gradients into the range of a narrow format."""

    init_scale: float = Field(
        default=65536.0,
        ge=SMALLEST_SCALE,
        le=LARGEST_SCALE,
        description="initial loss scale",
    )
    growth_factor: PowerOfTwo = Field(
        default=2.0,
        ge=2,
        le=LARGEST_SCALE,
        description="factor applied after growth_interval steps without overflow",
    )
    backoff_factor: PowerOfTwo = Field(
        default=0.5, gt=0, lt=1, description="factor applied after an overflow"
    )
    growth_interval: Steps = Field(
        default=2000, description="steps without overflow before the scale grows"
    )
    min_scale: float = Field(
        default=1.0,
        ge=SMALLEST_SCALE,
        le=LARGEST_SCALE,
        description="lower limit of the scale, at least 2**-24",
    )
    max_scale: float = Field(
        default=262144.0,
        ge=SMALLEST_SCALE,
        le=LARGEST_SCALE,
        description="upper limit of the scale",
    )
    hysteresis: Steps = Field(
        default=1, description="consecutive overflows before the scale is reduced"
    )
    dynamic: bool = Field(default=True, description="false: the scale stays at init_scale")
    max_skipped_steps: Steps = Field(
        default=50, description="consecutive overflows at min_scale before the run stops"
    )
    scale_groups: tuple[str, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="globs of modules that get a loss scale of their own",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield bounds that exclude each other or the first scale."""
        low, first, high = self.min_scale, self.init_scale, self.max_scale
        if low > high:
            text = f"min_scale must be at most max_scale, got {low:g} and {high:g}"
            yield ("min_scale", "max_scale"), text
        elif first > high:
            text = (
                f"init_scale must be at most max_scale {high:g}, got {first:g}. Write "
                f"init_scale={high:g}, or raise max_scale"
            )
            yield ("init_scale", "max_scale"), text
        elif first < low:
            text = (
                f"init_scale must be at least min_scale {low:g}, got {first:g}. Write "
                f"init_scale={low:g}, or lower min_scale"
            )
            yield ("init_scale", "min_scale"), text


class AdaptSection(Section):
    """When modules get a wider format than the policy's, and when they return."""

    enabled: bool = Field(
        default=False,
        description=(
            "use a wider format for modules that overflow, saturate or lose their gradients"
        ),
    )
    max_fraction: float = Field(
        default=0.25, ge=0, le=1, description="maximum fraction of modules widened at once"
    )
    cooldown: Steps = Field(
        default=100, description="minimum steps between two changes of a module"
    )
    calm_steps: Steps = Field(
        default=1000, description="steps without trouble before a module returns to its format"
    )
    overflows: StepsOrZero = Field(
        default=0,
        description="consecutive overflows after which the whole policy is widened; 0: never",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield limits on changes that are never made; `enabled: false` switches all of it off."""
        if self.enabled or self.overflows or "enabled" in self.model_fields_set:
            return
        for key in ("max_fraction", "cooldown", "calm_steps"):
            if getattr(self, key) != type(self).model_fields[key].default:
                text = f"{key} has no effect while adapt is off. Write adapt.enabled=true too, or "
                yield (key,), f"{text}leave {key} out"


class PrecisionSection(Section):
    """Which formats the run computes and keeps its numbers in."""

    policy: PolicyText = Field(
        default="default",
        description="preset name, the text of a policy, or @FILE to read a policy file",
    )
    overrides: dict[str, PolicyText] = Field(
        default_factory=dict,
        max_length=MOST_OVERRIDES,
        description="policy per module glob, for the modules that match",
    )
    emulate: bool | None = Field(
        default=None,
        description=(
            "none: emulate formats the hardware lacks; true: always emulate; false: raise an "
            "error instead"
        ),
    )
    skip_slow_fp8: bool = Field(
        default=True,
        description="use bf16 for layers where fp8 is not faster, as measured on this GPU",
    )
    loss_scale: LossScaleSection = Field(
        default_factory=LossScaleSection, description="loss scaling"
    )
    adapt: AdaptSection = Field(
        default_factory=AdaptSection,
        description="adaptive precision: formats change with what the tensors show",
    )
    schedule: tuple[PhaseSection, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="phases of the run, each {policy, overrides, until}; empty: a single phase",
    )
    fuse: Fuse = Field(
        default="auto",
        description=(
            "operations to fuse: auto, none, or any of loss, gelu, layer_norm, mask, rms_norm, "
            "rotary, swiglu"
        ),
    )
    task: TaskName | None = Field(
        default=None,
        description="kind of training, e.g. sft; sets defaults of precision, clip_norm and memory",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield phases whose end is missing, and the end of the last one."""
        for text in check_ends(self.schedule):
            yield ("schedule",), text


class CheckpointSection(Section):
    """When the state of the run is saved."""

    every: StepsOrZero = Field(
        default=0, description="steps between checkpoints; 0: only at the end and on signals"
    )
    keep: Steps = Field(
        default=2, description="number of checkpoints to keep; older ones are deleted"
    )
    background: bool = Field(
        default=False,
        description="write checkpoints in a background thread; training waits only for the copy",
    )


class EvalSection(Section):
    """When the model is evaluated."""

    every: StepsOrZero = Field(
        default=0, description="steps between evaluations; 0: only at the end"
    )
    patience: StepsOrZero = Field(
        default=0,
        description="stop after this many consecutive evaluations without improvement; 0: never",
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST_FP32,
        description="minimum change of the first metric that counts as an improvement",
    )
    keep_best: bool = Field(
        default=False,
        description="use the weights of the best evaluation as the result instead of the last ones",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield patience without evaluations, and a minimum change without patience."""
        if self.patience and not self.every:
            text = (
                "patience needs evaluations during training. Write eval.every=100, or leave "
                "patience out"
            )
            yield ("patience", "every"), text
        if self.min_delta and not self.patience:
            text = (
                "min_delta has no effect without patience. Write eval.patience=3, or leave "
                "min_delta out"
            )
            yield ("min_delta", "patience"), text


class HealthSection(Section):
    """What is looked at beside the training."""

    every: StepsOrZero = Field(
        default=50, description="steps between two samples of tensor statistics; 0: none"
    )
    diagnose: bool = Field(
        default=True,
        description="replay a non-finite step to find the module and tensor that caused it",
    )


class FaultSection(Section):
    """A number put in place of another, on purpose, for the passes of one micro-batch."""

    step: Steps = Field(description="step at which the fault is injected", examples=[40])
    module: str = Field(
        description="module name, or a glob that matches exactly one",
        examples=["blocks.1.mlp.up"],
    )
    role: Literal["input", "weight", "output", "grad_output", "grad_weight"] = Field(
        description="tensor the fault is injected into"
    )
    value: Literal["inf", "nan", "large", "bit-flip"] = Field(description="value that is injected")
    micro_batch: int = Field(
        default=1,
        ge=1,
        le=MOST_MICRO_BATCHES,
        description="micro-batch of the step",
        examples=[1],
    )
    index: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INDEX,
        description="index of the element; none: chosen by the seed",
        examples=[17],
    )


class MemorySection(Section):
    """What is computed again or kept on the host, to need less memory on the device."""

    activation_checkpointing: Literal["none", "blocks", "selective", "auto"] = Field(
        default="none",
        description=(
            "what the backward pass recomputes: none, whole blocks, everything in them except "
            "matmuls and attention (selective), or as few whole blocks as memory needs (auto)"
        ),
    )
    offload: Annotated[
        tuple[Literal["optimizer", "activations"], ...], Field(max_length=MOST_ENTRIES)
    ] = Field(
        default=(),
        description="what to keep in pinned host memory: optimizer state, activations",
    )
    blocks: tuple[str, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description=(
            "globs of the modules that are blocks; empty: detect lists of modules of one class"
        ),
    )
    fit: Literal["check", "auto", "ignore"] = Field(
        default="check",
        description=(
            "what to do with a run that does not fit: raise with advice (check), apply the first "
            "advice (auto), or try it (ignore)"
        ),
    )
    limit: str | None = Field(
        default=None,
        pattern=r"^\d+(\.\d+)?([KMGT]i?)?B$",
        description="memory that the run may use, e.g. 24GiB; none: what the device has",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield blocks by which nothing is done."""
        whole = self.activation_checkpointing == "none" and "activations" not in self.offload
        if self.blocks and whole:
            text = (
                "blocks has no effect without block-wise memory saving. Set "
                "activation_checkpointing=blocks too, or leave blocks out"
            )
            yield ("blocks", "activation_checkpointing"), text


class ParallelSection(Section):
    """How many processes train the model together, and what each of them has of it."""

    ranks: int | None = Field(
        default=None,
        ge=1,
        le=MOST_RANKS,
        description="processes that train together, one per GPU; none: those of the launcher, or 1",
    )
    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = Field(
        default="auto",
        description=(
            "what each rank has of the model: all (ddp), a shard (fsdp), or a shard per group of "
            "ranks (hsdp)"
        ),
    )
    shard: int | None = Field(
        default=None,
        ge=2,
        le=MOST_RANKS,
        description="ranks that share one copy of the weights (hsdp); none: those of a machine",
    )
    timeout: float = Field(
        default=600.0,
        ge=1,
        le=MOST_SECONDS,
        description="seconds that ranks wait for each other before the run ends",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        le=MOST_RESTARTS,
        description="restarts from the last checkpoint after a rank failed, with parallel.ranks",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield a shard size that nothing uses, and restarts of processes we do not start."""
        if self.shard is not None and self.strategy != "hsdp":
            text = "shard needs parallel.strategy=hsdp. Write it too, or leave shard out"
            yield ("shard", "strategy"), text
        if self.restarts and (self.ranks or 1) == 1:
            text = (
                "restarts needs parallel.ranks=2 or more. With torchrun, write "
                "`torchrun --max-restarts` instead"
            )
            yield ("restarts", "ranks"), text
