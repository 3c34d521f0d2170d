"""Save folders that `from_pretrained` of transformers and peft loads."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.numerics import plain_format
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.checkpoints.export import tied_names, whole_weights
from narrowcast.workloads.sft.models.base import base_to_merge
from narrowcast.workloads.sft.models.loading import is_block_scaled, load_config, quiet
from narrowcast.workloads.sft.settings import LoraSection, SftModel

MODEL = "final_model"
ADAPTER = "adapter"
MERGED = "merged_model"


def weights_folder(recipe: Recipe) -> str:
    """Return the folder of the trained weights, the full model if there is one."""
    if recipe.section(SftModel).tune == "full":
        return MODEL
    return MERGED if recipe.section(LoraSection).merge_adapter_with_base else ADAPTER


def write_models(folder: Path, prepared: Prepared, recipe: Recipe, *, tokenizer: Any) -> None:
    """Write the model folders of a run. With sharded weights, all ranks call it and one writes."""
    settings = recipe.section(SftModel)
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    if is_block_scaled(config):
        del config.quantization_config  # the saved weights are in 16 or 32 bits
    dtype = config.dtype or torch.float32
    if settings.save_dtype != "auto":
        dtype = plain_format(settings.save_dtype).dtype
    weights = whole_weights(prepared, trained=settings.tune != "full")
    if weights is None:
        return
    model: Any = prepared.model
    with quiet():
        if settings.tune == "full":
            saved = _save_full(folder / MODEL, model, weights, recipe, config=config, dtype=dtype)
        else:
            saved = _save_adapter(folder, model, weights, recipe, dtype=dtype)
        for each in saved:
            tokenizer.save_pretrained(each)


def _save_full(
    folder: Path,
    model: Any,
    weights: dict[str, Tensor],
    recipe: Recipe,
    *,
    config: Any,
    dtype: torch.dtype,
) -> list[Path]:
    """Write a full model with the weight names of its class; of tied weights only the first."""
    import transformers

    causal: Any = transformers.AutoModelForCausalLM
    config.eos_token_id = getattr(model.config, "eos_token_id", None)
    # The class that transformers knows; the trained model has fused modules inside.
    with torch.device("meta"):
        remote = recipe.section(SftModel).trust_remote_code
        shell = causal.from_config(config, dtype=dtype, trust_remote_code=remote)
    shell.generation_config = model.generation_config
    tied = tied_names(model)
    rounded = {
        name: weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype)
        for name, weight in weights.items()
        if name not in tied
    }
    shell.save_pretrained(folder, state_dict=rounded)
    return [folder]


def _save_adapter(
    folder: Path, model: Any, weights: dict[str, Tensor], recipe: Recipe, *, dtype: torch.dtype
) -> list[Path]:
    """Write the adapter in full precision and, if requested, merged into the base, rounded once."""
    from peft import PeftModel

    adapter = folder / ADAPTER
    model.save_pretrained(adapter, state_dict=weights, save_embedding_layers=False)
    if not recipe.section(LoraSection).merge_adapter_with_base:
        return [adapter]
    base = base_to_merge(recipe)
    base.generation_config = model.generation_config
    base.config.eos_token_id = getattr(model.config, "eos_token_id", None)
    merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged = merged.to(dtype)
    merged.config.dtype = dtype
    merged.save_pretrained(folder / MERGED)
    return [adapter, folder / MERGED]
