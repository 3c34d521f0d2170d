"""The settings of a recipe: those every one has, and the sections its workload adds.

A workload adds `data`, which extends `DataSection`, `model`, and any others of its own, all of
which extend `Section`. They reach the loader as one `Sections` value, so that this package knows no
workload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self, TypeVar, final

from pydantic import AfterValidator, Field, SerializeAsAny, ValidationError, model_validator

from narrowcast.config.common.memory import MemorySection
from narrowcast.config.common.strategy import StrategySection
from narrowcast.config.common_sections import (
    CheckpointSection,
    EmaSection,
    EvalSection,
    FaultSection,
    HealthSection,
    LrScheduleSection,
    OptimizerSection,
    PrecisionSection,
)
from narrowcast.config.limits import (
    LARGEST_FP32,
    LARGEST_INDEX,
    LONGEST_NAME,
    MOST_AHEAD,
    MOST_ENTRIES,
    MOST_EPOCHS,
    MOST_MICRO_BATCHES,
    MOST_SAMPLES,
    MOST_STEPS,
    MOST_WORKERS,
    UNSETTLED,
)
from narrowcast.config.phases import misplaced
from narrowcast.config.section import Section as Section
from narrowcast.config.section import check_conflicts as check_conflicts
from narrowcast.errors import ConfigError

_Kind = TypeVar("_Kind", bound=Section)


class DataSection(Section):
    """What every workload's `data` section has; workloads extend it."""

    places: ClassVar[tuple[str, ...]] = ()
    """Settings that say where the data lies and no more: with the same data somewhere else a run is
    the same. Only for tasks with a `data_digest`, which tells."""

    workers: int = Field(
        default=0,
        ge=0,
        le=MOST_WORKERS,
        description="worker processes that load batches; 0: load in the main process",
    )
    prefetch: int = Field(default=2, ge=1, le=MOST_AHEAD, description="batches loaded ahead")


@final
class Sections:
    """The sections a workload adds to the recipe: `Sections(data=…, model=…, ica=…)`."""

    def __init__(
        self, *, data: type[DataSection], model: type[Section], **further: type[Section]
    ) -> None:
        """Take the sections by name; one that every recipe has is refused."""
        for name in further:
            if name in CommonSettings.model_fields or name in Recipe.model_fields:
                raise ConfigError(
                    f"a section of a workload cannot be called {name}: every recipe has a setting "
                    f"of that name; choose another, e.g. {name}_settings"
                )
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ConfigError(
                    f"a section cannot be called {name!r}; write small letters, digits and _"
                )
        self.data, self.model = data, model
        self.by_name: Mapping[str, type[Section]] = MappingProxyType(
            {"data": data, "model": model, **further}
        )


class ProfileSection(Section):
    """Which steps are looked at closely: a trace of them, and a table of their operations."""

    steps: int = Field(
        default=0, ge=0, le=10_000, description="number of steps to profile; 0: none"
    )
    first: int = Field(default=10, ge=1, le=MOST_STEPS, description="first profiled step")

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a first step of no steps."""
        if not self.steps and self.first != type(self).model_fields["first"].default:
            text = "no step is profiled; write profile.steps=5 too, or leave first out"
            check_conflicts([(("first", "steps"), text)])
        return self


def _short_enough(name: str) -> str:
    """Refuse a name that no folder can have; letters beyond ASCII take two bytes or more."""
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"{len(name.encode())} bytes are too long for the name of a folder; write one of at "
            f"most {LONGEST_NAME}"
        )
    return name


class CommonSettings(Section):
    """The settings that are the same for every workload."""

    workload: str = Field(min_length=1, description="what to train, e.g. lm")
    name: Annotated[str, AfterValidator(_short_enough)] = Field(
        default="",
        max_length=LONGEST_NAME,
        description="name of the run; default: the name of the recipe file",
    )
    description: str = Field(default="", description="one line, shown by `narrowcast recipes`")
    seed: int = Field(
        default=0,
        ge=0,
        le=LARGEST_INDEX,
        description="random seed for weights, data order and noise",
    )
    steps: int = Field(
        ge=1, le=MOST_STEPS, description="number of optimizer steps, unless epochs is set"
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=MOST_EPOCHS,
        description="passes over the data, instead of steps; none: use steps",
    )
    batch_size: int = Field(ge=1, le=MOST_SAMPLES, description="samples per micro-batch")
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, le=MOST_MICRO_BATCHES, description="micro-batches per step"
    )
    clip_norm: float | None = Field(
        default=1.0,
        gt=0,
        le=LARGEST_FP32,
        description="maximum norm of all gradients together; none: no clipping",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="auto, cpu, mps, cuda or cuda:N",
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile")
    cuda_graph: bool | None = Field(
        default=None,
        description=(
            "run each step as a CUDA graph; none: for models up to a billion parameters without "
            "activation checkpointing"
        ),
    )
    deterministic: bool = Field(
        default=False, description="bit-identical results on GPUs too, up to twice as slow"
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="optimizer")
    lr_schedule: LrScheduleSection = Field(
        default_factory=LrScheduleSection, description="learning rate schedule"
    )
    ema: EmaSection = Field(
        default_factory=EmaSection, description="moving average of the weights (EMA)"
    )
    precision: PrecisionSection = Field(
        default_factory=PrecisionSection, description="number formats and loss scaling"
    )
    memory: MemorySection = Field(
        default_factory=MemorySection, description="memory saving on the device"
    )
    strategy: StrategySection = Field(
        default_factory=StrategySection, description="training strategy that needs fewer steps"
    )
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="saving")
    eval: EvalSection = Field(default_factory=EvalSection, description="evaluation")
    health: HealthSection = Field(default_factory=HealthSection, description="numerical health")
    fault_injection: tuple[FaultSection, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="faults to inject for testing: step, module, role, value",
    )
    profile: ProfileSection = Field(default_factory=ProfileSection, description="profiling")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="experiment trackers: tensorboard, wandb (offline)",
    )

    @model_validator(mode="after")
    def _can_be_rehearsed(self) -> Self:
        """Refuse faults that no step would have."""
        check_conflicts(
            [
                *(
                    (
                        ("fault_injection", "steps"),
                        f"step {fault.step} is after the last; write steps={fault.step}",
                    )
                    for fault in self.fault_injection
                    if fault.step > self.steps and self.is_settled
                ),
                *(
                    (
                        ("fault_injection", "gradient_accumulation_steps"),
                        f"a step has {self.gradient_accumulation_steps} micro-batches, not "
                        f"{fault.micro_batch}; "
                        f"write gradient_accumulation_steps={fault.micro_batch}",
                    )
                    for fault in self.fault_injection
                    if fault.micro_batch > self.gradient_accumulation_steps
                ),
            ]
        )
        return self

    @model_validator(mode="after")
    def _adapts_to_something(self) -> Self:
        """Refuse to adapt to readings that are never made."""
        if self.precision.adapt.enabled and self.health.every == 0:
            text = "formats follow what readings show, and there are none; write health.every=50"
            check_conflicts([(("precision.adapt.enabled", "health.every"), text)])
        return self

    @model_validator(mode="after")
    def _profile_fits(self) -> Self:
        """Refuse to profile steps that the run does not have."""
        first = self.profile.first
        if self.profile.steps and self.is_settled and first > self.steps:
            text = f"step {first} is after the last; write profile.first={self.steps} or less"
            check_conflicts([(("profile.first", "steps"), text)])
        return self

    @model_validator(mode="after")
    def _strategy_fits(self) -> Self:
        """Refuse what a strategy and the rest of the recipe cannot both have."""
        check_conflicts(list(_against_strategy(self)))
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        """Refuse a schedule in which a phase has no step of this run."""
        if self.is_settled:
            problems = misplaced(self.precision.schedule, steps=self.steps)
            check_conflicts([(("precision.schedule", "steps"), text) for text in problems])
        return self

    @property
    def is_settled(self) -> bool:
        """Whether it is known how many steps there are; of epochs it is once data was read."""
        return self.epochs is None or self.steps != UNSETTLED


def _against_strategy(settings: CommonSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    strategy = settings.strategy
    if not strategy.is_hybrid:
        return
    if settings.ema.decay is not None:
        text = (
            "hybrid training keeps averages by itself; leave ema.decay out, and write their "
            "half-lives: strategy.readout.half_lives=[0.03]"
        )
        yield ("ema.decay", "strategy.name"), text
    if strategy.has_phase_policies and settings.precision.schedule:
        text = (
            "phases of the run have policies of their own here already; leave schedule out, or "
            "write strategy.precision=policy"
        )
        yield ("precision.schedule", "strategy.precision"), text
    if strategy.has_phase_policies and settings.precision.adapt.overflows:
        text = (
            "overflows and phases would both choose the policy; leave overflows out, or write "
            "strategy.precision=policy"
        )
        yield ("precision.adapt.overflows", "strategy.precision"), text
    warmup = strategy.phases.warmup_steps
    if settings.is_settled and warmup is not None and warmup >= settings.steps:
        text = f"the warm-up would never end in {settings.steps} steps; write fewer than that"
        yield ("strategy.phases.warmup_steps", "steps"), text
    every = strategy.readout.every
    if settings.is_settled and every is not None and every > settings.steps:
        text = (
            f"averages would never be updated in {settings.steps} steps; write at most "
            f"{settings.steps}"
        )
        yield ("strategy.readout.every", "steps"), text
    default = type(strategy).model_fields["lr_horizon"].default
    if settings.lr_schedule.name == "constant" and strategy.lr_horizon not in (default, 1):
        text = (
            "a constant learning rate has no decay to lengthen; leave lr_horizon out, or choose "
            "lr_schedule.name=cosine or linear"
        )
        yield ("strategy.lr_horizon", "lr_schedule.name"), text


class Recipe(CommonSettings):
    """All settings of one run, with the sections of its workload."""

    data: SerializeAsAny[DataSection] = Field(description="training data")
    model: SerializeAsAny[Section] = Field(description="model")
    further: dict[str, SerializeAsAny[Section]] = Field(
        default_factory=dict, description="further sections of the workload, by name"
    )

    def for_samples(self, samples: int) -> Recipe:
        """Return the recipe with as many steps as its epochs have over so many samples.

        One that is settled already is returned as it is.
        """
        if self.is_settled or self.epochs is None:
            return self
        # Over all of them at once: a step is never short, so rounded up for each it would be more.
        steps = -(-samples * self.epochs // (self.batch_size * self.gradient_accumulation_steps))
        if not 0 < steps < MOST_STEPS:
            raise ConfigError(
                f"epochs={self.epochs}: over {samples} samples that are {steps} steps; a run has "
                f"1 to {MOST_STEPS - 1}"
            )
        values = {name: getattr(self, name) for name in type(self).model_fields}
        try:
            return type(self).model_validate({**values, "steps": steps})
        except ValidationError as error:  # what phases and faults have against it
            result = "; ".join(each["msg"] for each in error.errors(include_url=False))
            raise ConfigError(f"epochs={self.epochs} are {steps} steps here: {result}") from error

    @property
    def depends_on_steps(self) -> bool:
        """Whether a step does something else when the run has another number of steps."""
        phases = (phase.until for phase in self.precision.schedule)
        sections = (self.lr_schedule, self.data, self.model, *self.further.values())
        return (
            self.strategy.is_hybrid
            or any(isinstance(until, str | float) for until in phases)
            or any(section.depends_on_steps for section in sections)
        )

    def section(self, kind: type[_Kind]) -> _Kind:
        """Return the section of a class: `recipe.section(LmModel)`."""
        for section in (self.data, self.model, *self.further.values()):
            if isinstance(section, kind):
                return section
        raise ConfigError(f"a recipe of workload {self.workload} has no {kind.__name__}")
