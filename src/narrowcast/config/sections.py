"""The settings of a recipe: those every one has, and the sections its workload adds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeVar, final

from pydantic import AfterValidator, Field, SerializeAsAny, ValidationError

from narrowcast.config.common_sections import (
    CheckpointSection,
    EmaSection,
    EvalSection,
    FaultSection,
    HealthSection,
    LrScheduleSection,
    MemorySection,
    OptimizerSection,
    ParallelSection,
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
from narrowcast.config.section import Conflict, Steps
from narrowcast.config.section import Section as Section
from narrowcast.config.section import check_conflicts as check_conflicts
from narrowcast.config.strategy import StrategySection
from narrowcast.errors import ConfigError

_Kind = TypeVar("_Kind", bound=Section)


class DataSection(Section):
    """What every workload's `data` section has; workloads extend it."""

    places: ClassVar[tuple[str, ...]] = ()
    """Settings that say where the data lies and no more: with the same data somewhere else a run is
    the same. Only for tasks with a `data_digest`, which tells."""

    shorthand: ClassVar[tuple[str, ...]] = ()
    """Settings that the command line also takes without `data.`."""

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
        """Take the sections by name, and raise for one that every recipe has."""
        for name in further:
            if name in CommonSettings.model_fields or name in Recipe.model_fields:
                raise ConfigError(
                    f"a section of a workload cannot be called {name}, which every recipe has. "
                    f"Choose another name, e.g. {name}_settings"
                )
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ConfigError(
                    f"a section cannot be called {name!r}. Write small letters, digits and _"
                )
        self.data, self.model = data, model
        self.shorthand: Mapping[str, tuple[str, ...]] = MappingProxyType(
            {name: ("data", name) for name in data.shorthand}
        )
        self.by_name: Mapping[str, type[Section]] = MappingProxyType(
            {"data": data, "model": model, **further}
        )


class ProfileSection(Section):
    """Which steps are looked at closely: a trace of them, and a table of their operations."""

    steps: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="number of steps to profile; 0: none; profile=true profiles 5",
    )
    first: Steps = Field(default=10, description="first profiled step")

    def conflicts(self) -> Iterator[Conflict]:
        """Yield a first step of no steps."""
        if not self.steps and self.first != type(self).model_fields["first"].default:
            text = "first has no effect without profiled steps. Write profile.steps=5 too, or "
            yield ("first", "steps"), f"{text}leave first out"


def _short_enough(name: str) -> str:
    """Raise for a name that no folder can have; letters beyond ASCII take two bytes or more."""
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"must have at most {LONGEST_NAME} bytes to name a folder, got {len(name.encode())}"
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
    steps: Steps = Field(description="number of optimizer steps, unless epochs is set")
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
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="several GPUs and machines"
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

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings of different sections that exclude each other."""
        micro_batches = self.gradient_accumulation_steps
        for fault in self.fault_injection:
            if fault.step > self.steps and self.is_settled:
                text = f"step {fault.step} is after the last. Write steps={fault.step}"
                yield ("fault_injection", "steps"), text
            if fault.micro_batch > micro_batches:
                text = (
                    f"a step has {micro_batches} micro-batches, not {fault.micro_batch}. Write "
                    f"gradient_accumulation_steps={fault.micro_batch}"
                )
                yield ("fault_injection", "gradient_accumulation_steps"), text
        if self.precision.adapt.enabled and self.health.every == 0:
            text = "adapt needs samples of tensor statistics. Write health.every=50"
            yield ("precision.adapt.enabled", "health.every"), text
        first = self.profile.first
        if self.profile.steps and self.is_settled and first > self.steps:
            text = f"step {first} is after the last. Write profile.first={self.steps} or less"
            yield ("profile.first", "steps"), text
        if self.strategy.is_hybrid:
            yield from self._strategy_conflicts()
        if self.is_settled:
            for text in misplaced(self.precision.schedule, steps=self.steps):
                yield ("precision.schedule", "steps"), text

    def _strategy_conflicts(self) -> Iterator[Conflict]:
        """Yield what hybrid training and the rest of the recipe cannot both have."""
        strategy, precision = self.strategy, self.precision
        if self.ema.decay is not None:
            text = (
                "hybrid training has its own averages. Leave ema.decay out, and set their "
                "half-lives: strategy.readout.half_lives=[0.03]"
            )
            yield ("ema.decay", "strategy.name"), text
        fix = "or write strategy.precision=policy"
        if strategy.has_phase_policies and precision.schedule:
            text = f"strategy.precision sets a policy per phase already. Leave schedule out, {fix}"
            yield ("precision.schedule", "strategy.precision"), text
        if strategy.has_phase_policies and precision.adapt.overflows:
            text = f"strategy.precision sets the policy already. Leave overflows out, {fix}"
            yield ("precision.adapt.overflows", "strategy.precision"), text
        lengths = {"phases.warmup_steps": strategy.phases.warmup_steps}
        lengths["readout.every"] = strategy.readout.every
        for key, length in lengths.items():
            most = self.steps - (key == "phases.warmup_steps")
            if self.is_settled and length is not None and length > most:
                text = f"the run has only {self.steps} steps, got {length}. Write at most {most}"
                yield (f"strategy.{key}", "steps"), text
        default = type(strategy).model_fields["lr_horizon"].default
        if self.lr_schedule.name == "constant" and strategy.lr_horizon not in (default, 1):
            text = (
                "lr_horizon has no effect on a constant learning rate. Leave lr_horizon out, or "
                "choose lr_schedule.name=cosine or linear"
            )
            yield ("strategy.lr_horizon", "lr_schedule.name"), text

    @property
    def is_settled(self) -> bool:
        """Whether it is known how many steps there are; of epochs it is once data was read."""
        return self.epochs is None or self.steps != UNSETTLED


class Recipe(CommonSettings):
    """All settings of one run, with the sections of its workload."""

    data: SerializeAsAny[DataSection] = Field(description="training data")
    model: SerializeAsAny[Section] = Field(description="model")
    further: dict[str, SerializeAsAny[Section]] = Field(
        default_factory=dict, description="further sections of the workload, by name"
    )

    def for_samples(self, samples: int) -> Recipe:
        """Return the recipe with as many steps as its epochs have over so many samples."""
        if self.is_settled or self.epochs is None:
            return self
        # Over all of them at once: a step is never short, so rounded up for each it would be more.
        steps = -(-samples * self.epochs // (self.batch_size * self.gradient_accumulation_steps))
        if not 0 < steps < MOST_STEPS:
            raise ConfigError(
                f"epochs must give 1 to {MOST_STEPS - 1} steps, got {self.epochs}, which are "
                f"{steps} steps over {samples} samples"
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
