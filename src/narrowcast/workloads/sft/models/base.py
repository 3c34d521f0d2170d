"""The model of a recipe before any training, in the format its weights begin in."""

from typing import Any

import torch

from narrowcast.config.sections import Recipe
from narrowcast.hardware import probe
from narrowcast.numerics import plain_format
from narrowcast.workloads.sft.models.loading import load_model
from narrowcast.workloads.sft.settings import SftModel


def load_base(recipe: Recipe, *, device: torch.device) -> Any:
    """Load it to a device; on the meta device only its shape."""
    settings = recipe.section(SftModel)
    attention = settings.attn_implementation
    return load_model(
        settings.path,
        dtype=_dtype(recipe, device=device),
        device=device,
        trust_remote_code=settings.trust_remote_code,
        seed=recipe.seed,
        **({} if attention == "auto" else {"attn_implementation": attention}),
    )


def _dtype(recipe: Recipe, *, device: torch.device) -> torch.dtype | None:
    """Return what weights begin in: fp32 if trained; frozen, as asked or as the files have them."""
    settings = recipe.section(SftModel)
    if settings.tune == "full":
        return torch.float32
    if settings.base != "auto":
        return plain_format(settings.base).dtype
    where = recipe.device if device.type == "meta" else str(device)
    return torch.float32 if probe(where).support("bf16").how == "emulated" else None
