"""The memory settings and the blocks of a model they apply to: part of the plan.

A block is one of several modules of one class that a model holds in a list.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.folding import folded, groups_alike
from narrowcast.precision.plan.policy import matches, suggestion
from narrowcast.precision.swap import has_own_forward, plain_class

Checkpoint = Literal["none", "blocks", "selective", "auto"]
Offload = Literal["optimizer", "activations"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What to recompute or offload to save device memory, at the cost of time.

    Example:
        >>> nc.prepare(model, optimizer, memory=nc.Memory(activation_checkpointing="blocks"))
    """

    activation_checkpointing: Checkpoint = "none"
    """`blocks` recomputes whole blocks in the backward pass. `selective` stores matmul and
    attention outputs and recomputes the rest. `auto` recomputes as few whole blocks as a budget
    needs, which `nc.plan` decides from a batch."""
    offload: Sequence[Offload] = ()
    """What to store in host memory: `optimizer` (moments), `activations` (of blocks)."""
    blocks: Sequence[str] = ()
    """Globs of the modules that are blocks. Empty: detected."""
    budget: str | int | None = None
    """Memory that a step may take with `auto`, such as "120GiB". None: what the device has."""

    def __post_init__(self) -> None:
        if self.activation_checkpointing not in get_args(Checkpoint):
            close = suggestion(str(self.activation_checkpointing), get_args(Checkpoint))
            raise ConfigError(
                "memory.activation_checkpointing must be none, blocks, selective or auto, got "
                f"{self.activation_checkpointing!r}{close}."
            )
        for name in ("offload", "blocks"):
            if isinstance(inputs := getattr(self, name), str):
                raise ConfigError(
                    f"memory.{name} must be a list, got {inputs!r}. Write [{inputs!r}]."
                )
            object.__setattr__(self, name, tuple(dict.fromkeys(inputs)))
        for each in self.offload:
            if each not in get_args(Offload):
                raise ConfigError(
                    "memory.offload must be some of optimizer, activations, got "
                    f"{each!r}{suggestion(str(each), get_args(Offload))}."
                )
        automatic = self.activation_checkpointing == "auto"
        if automatic and "activations" in self.offload:
            raise ConfigError(
                "memory.activation_checkpointing=auto cannot be combined with "
                "memory.offload=[activations]. Leave one of them out."
            )
        if self.budget is not None:
            if not automatic:
                raise ConfigError(
                    "memory.budget has no effect without activation_checkpointing=auto, got "
                    f"{self.budget!r}. Leave it out."
                )
            parse_bytes(self.budget)
        if self.blocks and not self.by_block:
            raise ConfigError(
                "memory.blocks has no effect without activation checkpointing or activation "
                "offload. Write memory.activation_checkpointing=blocks too, or leave "
                "memory.blocks out."
            )

    @property
    def by_block(self) -> bool:
        """Whether anything is done per block."""
        return self.activation_checkpointing != "none" or "activations" in self.offload


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
         "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the bytes that a text such as `24GiB` names."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    matched = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if matched is None or not float(matched[1]):
        raise ConfigError(f'A memory size must be text such as "24GiB", got {text!r}.')
    return round(float(matched[1]) * UNITS[matched[2]])


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The largest memory of a training step, predicted before it runs."""

    allocated: int
    """Peak bytes of tensors, rounded as the device's allocator rounds them."""
    reserved: int
    """Peak bytes that torch's allocator takes from the device, with gaps between tensors."""
    context: int = 0
    """Bytes of the CUDA context, outside the allocator."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the peak by role: params, grads, master, moments, activations, temporaries …"""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Bytes of activations at the peak, by the module that made them."""
    notes: tuple[str, ...] = ()
    """What is approximate about the prediction."""

    @property
    def needed(self) -> int:
        """Bytes below which a step cannot run."""
        return self.allocated + self.context

    def fits(self, budget: str | int) -> bool:
        """Return whether a step fits, gaps of the allocator included: `fits("24GiB")`."""
        return self.reserved + self.context <= parse_bytes(budget)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "context": self.context,
            "roles": dict(self.roles),
            "modules": dict(self.modules),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What is recomputed and offloaded, and for which blocks."""

    requested: Memory = field(default_factory=Memory)
    blocks: tuple[str, ...] = ()
    """Names of the blocks in model order; empty if nothing is done per block."""
    on_host: int = 0
    """Bytes of the optimizer's moments that lie in the host's memory."""
    predicted: MemoryEstimate | None = None
    """The peak of a step; None if the plan was made without a batch."""
    chosen: str = ""
    """How many blocks `auto` chose to recompute, and why."""

    @property
    def offloads_optimizer(self) -> bool:
        """Whether moments are kept on the host."""
        return "optimizer" in self.requested.offload

    @property
    def offloads_activations(self) -> bool:
        """Whether what blocks keep for their backward pass waits on the host."""
        return "activations" in self.requested.offload

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "activation_checkpointing": self.requested.activation_checkpointing,
            "offload": list(self.requested.offload),
            "blocks": list(self.blocks),
            "on_host": self.on_host,
            **({} if self.predicted is None else {"predicted": self.predicted.to_json()}),
            **({"chosen": self.chosen} if self.chosen else {}),
        }

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What a plan says of it, each under the name of what is saved."""
        shown = []
        if self.requested.activation_checkpointing != "none":
            what = {
                "blocks": "recomputed in the backward pass; only their inputs are stored",
                "selective": "recomputed in the backward pass, except products and attention",
            }[self.requested.activation_checkpointing]
            shown.append(("blocks", f"{self._names}: {what}"))
        if self.chosen:
            shown.append(("blocks", self.chosen))
        if self.offloads_activations:
            text = "their saved activations wait in pinned host memory"
            shown.append(("blocks", f"{self._names}: {text}"))
        if self.offloads_optimizer:
            mib = self.on_host / 2**20
            text = f"moments, {mib:.1f} MiB, in pinned host memory, with a few on the device"
            shown.append(("offload", text))
        return shown

    @property
    def _names(self) -> str:
        alike = groups_alike(self.blocks, name=lambda name: name, treatment=lambda _: "")
        names = [f"{folded(some)} ×{len(some)}" if len(some) > 1 else some[0] for some in alike]
        return ", ".join(names)


def plan_memory(
    model: nn.Module, memory: Memory, *, hardware: Hardware, sizes: Mapping[str, int]
) -> MemoryPlan:
    """Decide what saves memory of a model, or say why that cannot be. `sizes` are by role."""
    if memory.offload and not hardware.device.startswith("cuda"):
        raise UnsupportedError(
            f"memory.offload={list(memory.offload)} needs a GPU, got {hardware.device}, whose "
            "memory is the host's. Leave memory.offload out."
        )
    if memory.activation_checkpointing == "auto":
        raise ConfigError(
            "memory.activation_checkpointing=auto needs a batch to predict memory from. Make the "
            "plan with nc.plan(model, policy, memory=..., batch=...) and pass it as policy= to "
            "prepare()."
        )
    names = block_names(model, memory.blocks) if memory.by_block else ()
    if memory.activation_checkpointing != "none":
        _check_own_checkpointing(model)
    if memory.activation_checkpointing == "selective":
        _check_in_place_writes(model, names)
    offloaded = "optimizer" in memory.offload
    return MemoryPlan(
        requested=memory, blocks=names, on_host=sizes.get("moments", 0) if offloaded else 0
    )


def block_names(model: nn.Module, globs: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of a model's blocks, or refuse to guess them."""
    if globs:
        return _matching(model, globs)
    # A single layer saves only its input, so recomputing it would gain nothing.
    result = tuple(
        name
        for name, block in repeated_blocks(model)
        if _is_called(block) and next(block.children(), None) is not None
    )
    if not result:
        raise ConfigError(
            "memory: no blocks were detected, because the model has no list of several modules of "
            'one class. Name them, for example memory.blocks=["encoder", "layers.*"], or leave '
            "memory out."
        )
    return result


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a model holds a list of, all of one class; the outermost such."""
    yield from _blocks_in("", model)


def _blocks_in(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = [(f"{name}.{child}".lstrip("."), each) for child, each in module.named_children()]
    if _holds_blocks(module, [each for _, each in inside]):
        yield from inside
        return
    for child, each in inside:
        yield from _blocks_in(child, each)


def _holds_blocks(module: nn.Module, inside: Sequence[nn.Module]) -> bool:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if not is_list or isinstance(module, ParametrizationList):
        return False
    return len(inside) > 1 and len({plain_class(each) for each in inside}) == 1


def _matching(model: nn.Module, globs: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not any(matches(name, glob) for name in names):
            raise ConfigError(
                f"memory.blocks: {glob!r} matches no module{suggestion(glob, names)}. Print the "
                "plan without it to see the module names."
            )
    matched: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in matched)
        if name and not inside and any(matches(name, glob) for glob in globs):
            if not _is_called(module):
                raise ConfigError(
                    f"memory.blocks: {name} is a {plain_class(module).__name__}, which is never "
                    f'called itself. Name the modules in it, for example "{name}.*".'
                )
            matched.append(name)
    return tuple(matched)


def _is_called(module: nn.Module) -> bool:
    return plain_class(module).forward is not nn.Module.forward or has_own_forward(module)


def _check_own_checkpointing(model: nn.Module) -> None:
    """Raise if a model of transformers already recomputes its blocks."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise ConfigError(
            "memory.activation_checkpointing: the model's own gradient checkpointing is on too, "
            "so blocks would be computed three times. Call model.gradient_checkpointing_disable() "
            "(in a recipe leave model.gradient_checkpointing out), or leave "
            "memory.activation_checkpointing out."
        )


def _check_in_place_writes(model: nn.Module, names: Sequence[str]) -> None:
    """Raise if the next layer overwrites a product that would be stored."""
    for block in names:
        for name, module in model.get_submodule(block).named_modules():
            if getattr(module, "inplace", False) is True:
                raise UnsupportedError(
                    "memory.activation_checkpointing=selective stores product outputs, but "
                    f"{block}.{name} overwrites its input. Build it with inplace=False, or write "
                    "memory.activation_checkpointing=blocks."
                )
