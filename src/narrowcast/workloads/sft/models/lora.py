"""Adapters of low rank beside frozen weights, by peft."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.sft.settings import LoraSection


def add_adapters(model: Any, settings: LoraSection, *, seed: int) -> Any:
    """Freeze a model and give its linear layers adapters, which begin as nothing."""
    import peft

    targets = _targets(model, settings)
    if settings.merge_adapter_with_base:
        _check_not_tied(model, targets)
    config: Any = peft.LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # it divides
        lora_dropout=settings.lora_dropout,
        target_modules=list(targets),
        bias=settings.lora_bias,
        fan_in_fan_out=_are_turned(model, targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise UnsupportedError(
                f"peft cannot add adapters to {', '.join(targets)}: {shortened(str(error), 300)}. "
                "Write other layers in lora.lora_target_modules."
            ) from error
    return adapted.train()


def _check_not_tied(model: Any, targets: Sequence[str]) -> None:
    """Refuse to merge into a weight that another module has too, which would change with it."""
    holders: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(weight), []).append(name.rpartition(".")[0])
    for names in holders.values():
        tied = [name for name in names if name.rpartition(".")[2] in targets]
        if tied and len(names) > 1:
            others = ", ".join(name for name in names if name != tied[0])
            raise ConfigError(
                f"lora.merge_adapter_with_base=true would also change {others}, whose weight is "
                f"tied to {tied[0]}. Remove {tied[0].rpartition('.')[2]} from "
                "lora.lora_target_modules, or write lora.merge_adapter_with_base=false."
            )


def adapted(model: Any) -> tuple[str, ...]:
    """Return the last names of the layers that have adapters."""
    result = model.targeted_module_names
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in result))


def _are_turned(model: Any, targets: Sequence[str]) -> bool:
    """Say whether layers have their weights turned round, as GPT-2's Conv1D."""
    from transformers.pytorch_utils import Conv1D

    named = model.named_modules()
    return any(isinstance(m, Conv1D) and n.rpartition(".")[2] in targets for n, m in named)


def _linear_names(model: Any) -> dict[str, int]:
    """Return the last names of the linear layers of a model but its head, and how many have it."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    counted: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            last = name.rpartition(".")[2]
            counted[last] = counted.get(last, 0) + 1
    return counted


def _targets(model: Any, settings: LoraSection) -> tuple[str, ...]:
    """Return the names of the layers that get adapters; refuse one that no layer has."""
    known = _linear_names(model)
    if not settings.targets:
        if not known:
            raise UnsupportedError(
                f"{type(model).__name__} has no linear layers besides its head to add adapters to. "
                "Write model.tune=full."
            )
        return tuple(known)
    names = [name for name, _ in model.named_modules()]
    for target in settings.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"lora.lora_target_modules must name linear layers, got {target}. The linear "
                f"layers are {', '.join(known)}."
            )
    return settings.targets
