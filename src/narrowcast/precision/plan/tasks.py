"""Which precision suits a task: a row per task, adapted to the model size and the hardware."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.memory import Checkpoint, Offload
from narrowcast.precision.plan.policy import suggestion

if TYPE_CHECKING:  # pydantic is not needed to ask for a row
    from narrowcast.config.load import LoadedRecipe

Wanted = Literal["fp8", "bf16", "fp16"]
Size = Literal["small", "medium", "large"]
SIZES: tuple[Size, ...] = get_args(Size)

MEDIUM_FROM, LARGE_FROM = 100_000_000, 1_000_000_000
"""Parameters. Below the first, layers are narrower than 1024, where fp8 is slower than bf16
(hardware/speeds.py). From the second on, weights, gradients and moments are 16 GB."""

OVERFLOWS = 5
"""Overflows in a row after which a run in fp16 goes over to a wider format."""


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """What a task asks for, whatever it runs on."""

    wants: Wanted
    """The narrowest format that is good enough for it."""
    clip_norm: float | None = 1.0
    growth_interval: int = 2000
    """Calm steps before a loss scale grows, where there is one."""
    activation_checkpointing: Checkpoint = "none"
    """What is computed again in the backward pass instead of being kept."""
    offload: tuple[Offload, ...] = ()
    """What is kept in the memory of the host."""
    offload_from: Size = "medium"
    """The smallest model it is offloaded for."""
    fp8_above_bytes: int = 0
    """Memory a GPU must have more of for fp8."""
    reason: str


TASKS: Mapping[str, TaskRow] = types.MappingProxyType(
    {
        "genome_annotation": TaskRow(
            wants="fp8",
            activation_checkpointing="blocks",
            reason="a label per base of long sequences: products and activations dominate the step",
        ),
        "variant_effect": TaskRow(
            wants="bf16",
            clip_norm=0.5,
            growth_interval=1000,
            reason=(
                "differences between two similar sequences are small: no fp8, and tight gradient "
                "clipping"
            ),
        ),
        "protein_function": TaskRow(
            wants="fp8",
            activation_checkpointing="blocks",
            offload=("optimizer",),
            offload_from="large",
            fp8_above_bytes=32 * 2**30,
            reason=(
                "many classes over sequences of medium length: saving memory matters more than "
                "speed"
            ),
        ),
        "generation": TaskRow(
            wants="fp16",
            clip_norm=2.0,
            growth_interval=500,
            activation_checkpointing="blocks",
            offload=("optimizer",),
            reason=(
                "logits need precision more than range; the loss scale grows often, and rare "
                "large gradients pass"
            ),
        ),
        "domain_adaptation": TaskRow(
            wants="fp16",
            clip_norm=0.8,
            growth_interval=1500,
            reason=(
                "gradients change as layers are unfrozen: the loss scale grows slowly, with a "
                "wider format as fallback"
            ),
        ),
        "classify": TaskRow(
            wants="bf16",
            reason="one label per sequence and a small network: fp8 layers would be no faster",
        ),
        "pretrain": TaskRow(
            wants="fp8",
            reason="large products dominate the step, and fp8 trains as well in our measurements",
        ),
        "sft": TaskRow(
            wants="bf16", reason="short runs with small updates: no time for a loss scale to settle"
        ),
        "lora": TaskRow(
            wants="bf16",
            reason=(
                "adapters are narrow, and fp8 gains nothing on narrow layers; the frozen base can "
                "be stored in e4m3 separately"
            ),
        ),
        "rl_fp16": TaskRow(
            wants="fp16",
            reason="sampler and trainer probabilities must agree: fp16 has 3 more bits than bf16",
        ),
        "forecast": TaskRow(wants="bf16", reason="series are normalised, so range does not matter"),
        "decompose": TaskRow(
            wants="bf16",
            clip_norm=None,
            reason=(
                "components and gates are clipped separately; small differences of weights stay "
                "in fp32 under every policy"
            ),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class TaskPrecision:
    """Precision settings for a task, model size and device, with the reasons."""

    task: str
    size: Size
    hardware: str
    """Class of the device: cpu, < 8.0, 8.0, 8.9, ≥ 9.0, or mps."""
    policy: str
    """Name of a preset."""
    overflows: int
    """Overflows in a row before the run switches to a wider format; 0: never."""
    clip_norm: float | None
    growth_interval: int
    activation_checkpointing: Checkpoint
    offload: tuple[Offload, ...]
    row: str
    """Why these settings suit the task."""
    reason: str
    """Why this format on this device."""
    left_out: tuple[str, ...] = ()
    """Settings of the task that are not used here, with the reason."""

    @property
    def origin(self) -> str:
        """What `resolved.json` calls it."""
        return f"task {self.task}"

    def defaults_for(self, recipe: LoadedRecipe) -> dict[str, Any]:
        """Return its settings, without those for a policy that the recipe replaces."""
        settings = self.settings()
        if recipe.origins["precision.policy"] not in ("default", self.origin):
            del settings["precision.adapt.overflows"]
        return settings

    def settings(self) -> dict[str, Any]:
        """Return it as settings of a recipe, by dotted key."""
        return {
            "precision.policy": self.policy,
            "precision.loss_scale.growth_interval": self.growth_interval,
            "precision.adapt.overflows": self.overflows,
            "clip_norm": self.clip_norm,
            "memory.activation_checkpointing": self.activation_checkpointing,
            "memory.offload": self.offload,
        }


def optimal_precision(task: str, model_size: Size | int, hardware: Hardware) -> TaskPrecision:
    """Return the precision settings that suit a task, a model size and a device.

    Args:
        task: Name of a task in `TASKS`.
        model_size: "small", "medium", "large", or the number of parameters.
        hardware: The device, from `detect_hardware()`.

    Returns:
        The settings and the reasons. Pass them to `apply_task`.

    Raises:
        ConfigError: The task or the size is unknown.

    Example:
        >>> nc.optimal_precision("lora", 7_000_000_000, nc.detect_hardware()).policy
    """
    if task not in TASKS:
        raise ConfigError(
            f"There is no task {task!r:.60}{suggestion(str(task), TASKS)}. The tasks are "
            f"{', '.join(TASKS)}."
        )
    row, size = TASKS[task], model_size_class(model_size)
    policy, reason = _format(row, size, hardware)
    offload, left_out = _offload(row, size, hardware)
    return TaskPrecision(
        task=task,
        size=size,
        hardware=hardware_class(hardware),
        policy=policy,
        overflows=OVERFLOWS if policy == "fp16" else 0,
        clip_norm=row.clip_norm,
        growth_interval=row.growth_interval,
        activation_checkpointing=row.activation_checkpointing,
        offload=offload,
        row=row.reason,
        reason=reason,
        left_out=left_out,
    )


def apply_task(recipe: LoadedRecipe, chosen: TaskPrecision) -> LoadedRecipe:
    """Return the recipe with a task's precision settings as defaults.

    Args:
        recipe: The recipe. Settings written in it stay.
        chosen: The result of `optimal_precision`.

    Returns:
        The new recipe.
    """
    return recipe.with_defaults(chosen.defaults_for(recipe), origin=chosen.origin)


def model_size_class(model_size: Size | int) -> Size:
    """Return the size of a model of so many parameters, or the one that is named."""
    if isinstance(model_size, str):
        if model_size not in SIZES:
            raise ConfigError(
                f"model_size must be {', '.join(SIZES)} or a number of parameters, got "
                f"{model_size!r:.60}."
            )
        return model_size
    inputs: object = model_size
    is_number = isinstance(inputs, Real) and not isinstance(inputs, bool)
    if not (is_number and 0 <= model_size < math.inf):
        raise ConfigError(
            f"model_size must be {', '.join(SIZES)} or a number of parameters, got "
            f"{model_size!r:.60}. Write e.g. model_size=125_000_000."
        )
    return "small" if model_size < MEDIUM_FROM else "medium" if model_size < LARGE_FROM else "large"


def hardware_class(hardware: Hardware) -> str:
    """Return the class of a machine: by compute capability where it has one, else by device."""
    capability = hardware.capability
    if capability is None:
        return hardware.device.partition(":")[0]
    if capability < (8, 0):
        return "< 8.0"
    if capability < (8, 9):
        return "8.0"
    return "8.9" if capability < (9, 0) else "≥ 9.0"


def _format(row: TaskRow, size: Size, hardware: Hardware) -> tuple[str, str]:
    """Return the preset for a row here, and why; never an emulated one: fp32 is faster."""
    has = {name: hardware.support(name).how == "native" for name in ("e4m3", "bf16", "fp16")}
    if _is_cpu(hardware):
        # Not even where it is fast: see docs/concepts/precision-by-task.md.
        has["fp16"] = False
    not_wanted = ""
    if row.wants == "fp8":
        if not (not_wanted := _no_fp8(row, size, hardware)):
            return "fp8-delayed", (
                f"{hardware.name} has fp8 matmuls; layers where fp8 measures no faster stay in bf16"
            )
    elif row.wants == "fp16":
        if has["fp16"]:
            return "fp16", (
                f"{hardware.name} has fp16 matmuls; after {OVERFLOWS} overflows in a row the run "
                "switches to a wider format, and back later"
            )
        not_wanted = f"no fp16: {_no_fp16(hardware)}; "
    if has["bf16"]:
        return "bf16", f"{not_wanted}{hardware.name} has bf16 matmuls, and bf16 needs no loss scale"
    if has["fp16"]:
        return "fp16", (
            f"{not_wanted}{hardware.name} has fp16 matmuls but not bf16; after {OVERFLOWS} "
            "overflows in a row the run switches to a wider format, and back later"
        )
    return "fp32", (
        f"{not_wanted}{hardware.name} has no faster matmuls than fp32: "
        f"{hardware.support('bf16').reason}"
    )


def _no_fp8(row: TaskRow, size: Size, hardware: Hardware) -> str:
    """Return why a row that asks for fp8 does not get it; empty if it does."""
    e4m3, least = hardware.support("e4m3"), row.fp8_above_bytes
    if e4m3.how != "native":
        return f"no fp8: {e4m3.reason}; "
    if size == "small":
        return "no fp8: layers of a small model are slower in fp8 than in bf16; "
    if least and (hardware.memory_bytes or 0) <= least:
        return f"no fp8: it needs a GPU with more than {least // 2**30} GiB; "
    return ""


def _no_fp16(hardware: Hardware) -> str:
    if _is_cpu(hardware):
        return "most CPUs are far slower in fp16 than in fp32, and fp16 needs a loss scale"
    return hardware.support("fp16").reason


def _offload(
    row: TaskRow, size: Size, hardware: Hardware
) -> tuple[tuple[Offload, ...], tuple[str, ...]]:
    """Return what is offloaded here, and what is not with the reason."""
    if not row.offload:
        return (), ()
    what = " and ".join(row.offload)
    if hardware.capability is None:
        return (), (f"offload of {what}: {hardware_class(hardware)} has no separate memory",)
    if SIZES.index(size) < SIZES.index(row.offload_from):
        return (), (f"offload of {what}: the state of {size} models fits on the device",)
    return row.offload, ()


def _is_cpu(hardware: Hardware) -> bool:
    return hardware.device.partition(":")[0] == "cpu"
