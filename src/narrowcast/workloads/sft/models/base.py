"""The model of a recipe before any training: its weights in the format they begin in, adapters on.

The base is frozen in fewer bits before it goes to its device, which then never holds the wide one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.numerics import plain_format
from narrowcast.workloads.sft.attention import separate_conversations
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.models.loading import load_model
from narrowcast.workloads.sft.models.lora import add_adapters
from narrowcast.workloads.sft.models.quantised import (
    BITSANDBYTES,
    check_mergeable,
    dequantized_base,
    keep_base,
    loading_options,
)
from narrowcast.workloads.sft.settings import LoraSection, SftModel


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Built:
    """A model that is ready to be trained."""

    model: Any
    bounded: bool
    """Whether its attention is told where the conversations of a row end."""
    quantized: Mapping[str, float]
    """Of each layer whose frozen weight is kept in e4m3: what of it is left, in dB."""


def build_model(recipe: Recipe, *, device: torch.device) -> Built:
    """Return what is trained, on a device; on the meta device only its shapes."""
    settings, lora = recipe.section(SftModel), recipe.section(LoraSection)
    # What is missing here comes before what does not go together.
    loading_options(settings.base_dtype, device=device, compute=torch.float32)
    check_merge(settings, lora)
    model = _loaded(recipe, device=device, on=_first_device(settings, device))
    bounded = _bound(model, recipe, device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.tune == "full":
        return Built(model=model, bounded=bounded, quantized={})
    if lora.merge_adapter_with_base:
        check_mergeable(model)
    model = add_adapters(model, lora, seed=recipe.seed)
    stored: dict[str, float] = {}
    if settings.base_dtype == "e4m3":
        stored = keep_base(model, products=settings.base_products)
        model = model.to(device)
    return Built(model=model, bounded=bounded, quantized=stored)


def base_to_merge(recipe: Recipe) -> Any:
    """Return the base as adapters were trained beside it, in fp32 on the CPU."""
    cpu = torch.device("cpu")
    model = _loaded(recipe, device=cpu, on=cpu).float()
    return dequantized_base(model, recipe.section(SftModel).base_dtype)


def _bound(model: Any, recipe: Recipe, device: torch.device) -> bool:
    """Let a model be told where the conversations of a row end, where that is of use.

    It is for packed rows. On a GPU it is for others too: left to itself, transformers looks at the
    positions of every batch to find out, and the host waits for that.
    """
    packing = recipe.section(SftData).packing
    if recipe.section(SftModel).attn_implementation != "auto":
        return False
    if packing:
        separate_conversations(model)
        return True
    if device.type != "cuda":
        return False
    try:
        separate_conversations(model)
    except UnsupportedError:  # rows of one conversation need it not
        return False
    return True


def check_merge(settings: SftModel, lora: LoraSection) -> None:
    """Refuse at once what could not be done at the end."""
    if settings.base_dtype in BITSANDBYTES and lora.merge_adapter_with_base:
        raise ConfigError(
            "lora.merge_adapter_with_base=true is not possible with "
            f"model.base_dtype={settings.base_dtype}: bitsandbytes would quantize the merged "
            "weights again. Write lora.merge_adapter_with_base=false, or model.base_dtype=e4m3 or "
            "bf16."
        )


def _first_device(settings: SftModel, device: torch.device) -> torch.device:
    narrowed = settings.base_dtype == "e4m3" and device.type != "meta"
    return torch.device("cpu") if narrowed else device


def _loaded(recipe: Recipe, *, device: torch.device, on: torch.device) -> Any:
    settings = recipe.section(SftModel)
    attention = settings.attn_implementation
    dtype = _dtype(recipe, device=device)
    compute = dtype or torch.bfloat16
    return load_model(
        settings.path,
        dtype=dtype,
        device=on,
        trust_remote_code=settings.trust_remote_code,
        seed=recipe.seed,
        **({} if attention == "auto" else {"attn_implementation": attention}),
        **loading_options(settings.base_dtype, device=device, compute=compute),
    )


def _dtype(recipe: Recipe, *, device: torch.device) -> torch.dtype | None:
    """Return what weights begin in: fp32 if trained; frozen, as asked or as the files have them."""
    settings = recipe.section(SftModel)
    if settings.tune == "full":
        return torch.float32
    if settings.base_dtype in ("fp32", "bf16", "fp16"):
        return plain_format(settings.base_dtype).dtype
    where = recipe.device if device.type == "meta" else str(device)
    return torch.float32 if detect_hardware(where).support("bf16").how == "emulated" else None
