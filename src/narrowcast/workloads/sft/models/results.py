"""What a run of a recipe leaves: which folders, and from what."""

from pathlib import Path
from typing import Any

from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.checkpoints.export import tied_names
from narrowcast.workloads.sft.models.base import base_to_merge
from narrowcast.workloads.sft.models.loading import load_config
from narrowcast.workloads.sft.models.saving import (
    save_adapter,
    save_merged,
    save_model,
    saved_dtype,
)
from narrowcast.workloads.sft.settings import LoraSection, SftModel

MODEL = "final_model"
ADAPTER = "adapter"
MERGED = "merged_model"


def weights_folder(recipe: Recipe) -> str:
    """Return the folder in which a run leaves what it trained, the whole model if there is one."""
    if recipe.section(SftModel).tune == "full":
        return MODEL
    return MERGED if recipe.section(LoraSection).merge_adapter_with_base else ADAPTER


def write_models(folder: Path, prepared: Prepared, recipe: Recipe, *, tokenizer: Any) -> None:
    """Write folders that transformers and peft load."""
    settings = recipe.section(SftModel)
    model: Any = prepared.model
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    dtype = saved_dtype(settings.save_dtype, config)
    if settings.tune == "full":
        config.eos_token_id = getattr(model.config, "eos_token_id", None)
        save_model(
            config,
            _untied(prepared),
            folder / MODEL,
            tokenizer=tokenizer,
            dtype=dtype,
            generation=model.generation_config,
            trust_remote_code=settings.trust_remote_code,
        )
        return
    adapter = folder / ADAPTER
    save_adapter(model, prepared.engine.weights.full_by_name(), adapter, tokenizer=tokenizer)
    if recipe.section(LoraSection).merge_adapter_with_base:
        base = base_to_merge(recipe)
        base.generation_config = model.generation_config
        base.config.eos_token_id = getattr(model.config, "eos_token_id", None)
        save_merged(base, adapter, folder / MERGED, tokenizer=tokenizer, dtype=dtype)


def _untied(prepared: Prepared) -> dict[str, Tensor]:
    """Return all weights, of those that are tied the first: rounded apart they would be two."""
    tied = tied_names(prepared.model)
    return {
        name: w for name, w in prepared.engine.weights.full_by_name().items() if name not in tied
    }
