"""The settings every recipe has, as strict frozen models: name, type, default and one line each.

A workload adds two sections of its own: `data`, which extends `DataSection`, and `model`, which
extends `Section`. They reach the loader as one `Sections` value, so that this package knows no
workload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny, model_validator

from narrowcast.config.phases import Schedule, misplaced
from narrowcast.config.section import Section as Section
from narrowcast.config.section import refuse_conflicts as refuse_conflicts

LARGEST_SCALE = 2.0**126
"""The largest power of two whose inverse fp32 holds too, the format the scale is kept in."""
SMALLEST_SCALE = 2.0**-24
"""The smallest positive value of fp16: a scale below it would flush a gradient of 1."""


class DataSection(Section):
    """What every workload's `data` section has; workloads extend it."""

    workers: int = Field(default=0, ge=0, description="processes that load batches; 0: none")
    prefetch: int = Field(default=2, ge=1, description="batches kept ready ahead of the step")


@dataclass(frozen=True)
class Sections:
    """The two sections a workload adds to the recipe."""

    data: type[DataSection]
    model: type[BaseModel]


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
    lr: float = Field(default=1e-3, ge=0, description="learning rate at its highest")
    weight_decay: float = Field(
        default=0.01, ge=0, description="weight decay on parameters of two or more dimensions"
    )
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.999), description="decay of the two moments (adam, adamw)"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum (sgd, rmsprop)")
    fused: bool | None = Field(
        default=None, description="one kernel for all parameters; none: where the device has it"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a setting the chosen optimizer would ignore."""
        defaults = type(self).model_fields
        refuse_conflicts(
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
    warmup: int = Field(default=0, ge=0, description="steps over which lr rises to its highest")
    final: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of lr left when the run is over (cosine, linear)",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse an end value for a schedule that does not fall."""
        if self.name == "constant" and self.final not in (0.0, 1.0):
            text = "a constant schedule does not fall; leave final out, or choose cosine or linear"
            refuse_conflicts([(("final", "name"), text)])
        return self


class EmaSection(Section):
    """The moving average of the weights."""

    decay: float | None = Field(
        default=None, ge=0, lt=1, description="share of the average kept per step; none: no average"
    )


class LossScaleSection(Section):
    """The factor on the loss that lifts small gradients into the range of a narrow format."""

    initial: float = Field(default=65536.0, description="scale of the first step")
    growth: PowerOfTwo = Field(
        default=2.0, ge=2, description="factor after growth_interval calm steps"
    )
    backoff: PowerOfTwo = Field(default=0.5, gt=0, lt=1, description="factor after an overflow")
    growth_interval: int = Field(default=2000, ge=1, description="calm steps before it grows")
    min: float = Field(
        default=1.0, ge=SMALLEST_SCALE, le=LARGEST_SCALE, description="the floor, 2**-24 or more"
    )
    max: float = Field(
        default=262144.0, ge=SMALLEST_SCALE, le=LARGEST_SCALE, description="the ceiling"
    )
    hysteresis: int = Field(default=1, ge=1, description="overflows in a row before it backs off")
    dynamic: bool = Field(default=True, description="false: the scale stays at initial")
    patience: int = Field(
        default=50, ge=1, description="overflows in a row at the floor before giving up"
    )
    scale_groups: tuple[str, ...] = Field(
        default=(), description="globs of modules that get a scale of their own"
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        """Refuse bounds that exclude each other or the first scale."""
        if self.min > self.max:
            text = f"min {self.min:g} is above max {self.max:g}; lower min, or raise max"
            refuse_conflicts([(("min", "max"), text)])
        if self.initial > self.max:
            text = (
                f"initial {self.initial:g} is above max {self.max:g}; "
                f"write initial={self.max:g}, or raise max"
            )
            refuse_conflicts([(("initial", "max"), text)])
        if self.initial < self.min:
            text = (
                f"initial {self.initial:g} is below min {self.min:g}; "
                f"write initial={self.min:g}, or lower min"
            )
            refuse_conflicts([(("initial", "min"), text)])
        return self


class AdaptSection(Section):
    """When modules get a wider format than the policy's, and when they return."""

    enabled: bool = Field(
        default=False, description="widen modules that overflow, saturate or lose their gradients"
    )
    most: float = Field(default=0.25, ge=0, le=1, description="share of modules widened at once")
    cooldown: int = Field(default=100, ge=1, description="steps between two changes of a module")
    calm: int = Field(default=1000, ge=1, description="steps without trouble before it returns")


class PrecisionSection(Section):
    """Which formats the run computes and keeps its numbers in."""

    policy: str = Field(
        default="default", min_length=1, description="name of a preset, or the text of a policy"
    )
    overrides: dict[str, str] = Field(
        default_factory=dict, description="module glob: policy for the modules it matches"
    )
    emulate: bool | None = Field(
        default=None,
        description="none: where the machine lacks the format; true: always; false: refuse instead",
    )
    only_faster: bool = Field(
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
        default=(), description="phases of the run, each {policy, overrides, until}; none: one"
    )


class CheckpointSection(Section):
    """When the state of the run is saved."""

    every: int = Field(default=0, ge=0, description="steps between; 0: at the end and on signals")
    keep: int = Field(default=2, ge=1, description="checkpoints kept; older ones are deleted")


class EvalSection(Section):
    """When the model is evaluated."""

    every: int = Field(default=0, ge=0, description="steps between; 0: at the end")


class HealthSection(Section):
    """What is looked at beside the training."""

    every: int = Field(
        default=50,
        ge=0,
        description="steps between two readings of what tensors lose to their formats; 0: none",
    )
    verdicts: bool = Field(
        default=True,
        description="replay a step that is not finite, to name where that came from",
    )


class FaultSection(Section):
    """A number put in place of another, on purpose, for the passes of one micro-batch."""

    step: int = Field(ge=1, description="the step it is put into", examples=[40])
    module: str = Field(
        description="name of a module, or a glob that matches exactly one",
        examples=["blocks.1.mlp.up"],
    )
    role: Literal["input", "weight", "output", "grad_output", "grad_weight"] = Field(
        description="the tensor it is put into"
    )
    value: Literal["inf", "nan", "large", "bit-flip"] = Field(description="what is put there")
    micro_batch: int = Field(
        default=1, ge=1, description="the micro-batch of the step", examples=[1]
    )
    index: int | None = Field(
        default=None,
        ge=0,
        description="which number of the tensor; none: chosen by the seed",
        examples=[17],
    )


class CommonSettings(Section):
    """The settings that are the same for every workload."""

    workload: str = Field(min_length=1, description="what is trained, e.g. lm")
    name: str = Field(default="", description="name of the run; from the recipe's file name")
    description: str = Field(default="", description="one line shown by `narrowcast recipes`")
    seed: int = Field(default=0, ge=0, lt=2**63, description="fixes weights, data order, noise")
    steps: int = Field(ge=1, description="optimizer steps to run")
    batch_size: int = Field(ge=1, description="samples per micro-batch")
    accumulate: int = Field(default=1, ge=1, description="micro-batches per step")
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest norm of all gradients together; none: no clipping"
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="auto, cpu, mps, cuda or cuda:N",
    )
    compile: bool = Field(default=False, description="run the model through torch.compile")
    cuda_graph: bool | None = Field(
        default=None,
        description="replay each step as a CUDA graph; none: up to a billion parameters",
    )
    deterministic: bool = Field(
        default=False, description="the same bits in every run on a GPU too, up to twice as slow"
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="optimizer")
    lr_schedule: LrScheduleSection = Field(
        default_factory=LrScheduleSection, description="the course of the learning rate"
    )
    ema: EmaSection = Field(default_factory=EmaSection, description="moving average of weights")
    precision: PrecisionSection = Field(
        default_factory=PrecisionSection, description="formats and loss scale"
    )
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="saving")
    eval: EvalSection = Field(default_factory=EvalSection, description="evaluation")
    health: HealthSection = Field(default_factory=HealthSection, description="numerical health")
    faults: tuple[FaultSection, ...] = Field(
        default=(), description="faults to rehearse: step, module, role, value"
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="programs that are told of the run too; wandb without a network"
    )

    @model_validator(mode="after")
    def _can_be_rehearsed(self) -> Self:
        """Refuse faults that no step would have."""
        refuse_conflicts(
            [
                *(
                    (
                        ("faults", "steps"),
                        f"step {fault.step} is after the last; write steps={fault.step}",
                    )
                    for fault in self.faults
                    if fault.step > self.steps
                ),
                *(
                    (
                        ("faults", "accumulate"),
                        f"a step has {self.accumulate} micro-batches, not {fault.micro_batch}; "
                        f"write accumulate={fault.micro_batch}",
                    )
                    for fault in self.faults
                    if fault.micro_batch > self.accumulate
                ),
            ]
        )
        return self

    @model_validator(mode="after")
    def _adapts_to_something(self) -> Self:
        """Refuse to adapt to readings that are never made."""
        if self.precision.adapt.enabled and self.health.every == 0:
            text = "formats follow what readings show, and there are none; write health.every=50"
            refuse_conflicts([(("precision.adapt.enabled", "health.every"), text)])
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        """Refuse a schedule in which a phase has no step of this run."""
        problems = misplaced(self.precision.schedule, steps=self.steps)
        refuse_conflicts([(("precision.schedule", "steps"), text) for text in problems])
        return self


class Recipe(CommonSettings):
    """All settings of one run, with the two sections of its workload."""

    data: SerializeAsAny[DataSection] = Field(description="what is trained on")
    model: SerializeAsAny[BaseModel] = Field(description="what is trained")
