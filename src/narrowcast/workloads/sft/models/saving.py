"""Save folders that `from_pretrained` of transformers and peft loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.numerics import plain_format
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.checkpoints.export import tied_names
from narrowcast.workloads.sft.models.base import base_to_merge
from narrowcast.workloads.sft.models.loading import load_config, quiet
from narrowcast.workloads.sft.settings import LoraSection, SftModel


def save_model(
    config: Any,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    tokenizer: Any,
    dtype: torch.dtype,
    generation: Any = None,
    trust_remote_code: bool = False,
) -> None:
    """Write a full model with the weight names of its class."""
    import transformers

    causal: Any = transformers.AutoModelForCausalLM
    # Of the class that transformers knows; the trained one has other classes inside.
    with torch.device("meta"), quiet():
        shell = causal.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if generation is not None:
        shell.generation_config = generation
    rounded = {name: _rounded(weight, dtype) for name, weight in weights.items()}
    with quiet():
        shell.save_pretrained(folder, state_dict=rounded)
        tokenizer.save_pretrained(folder)


def save_adapter(
    model: Any, weights: Mapping[str, Tensor], folder: Path, *, tokenizer: Any
) -> None:
    """Write the adapters of a peft model in full precision."""
    with quiet():
        model.save_pretrained(folder, state_dict=dict(weights), save_embedding_layers=False)
        tokenizer.save_pretrained(folder)


def save_merged(
    base: Any, adapter: Path, folder: Path, *, tokenizer: Any, dtype: torch.dtype
) -> None:
    """Merge an adapter into the fp32 base and write it, rounded once."""
    from peft import PeftModel

    with quiet():
        merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
        merged = merged.to(dtype)
        merged.config.dtype = dtype
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def saved_dtype(name: str, config: Any) -> torch.dtype:
    """Return the dtype to save in."""
    if name == "auto":
        dtype: torch.dtype | None = config.dtype
        return dtype or torch.float32
    dtype = plain_format(name).dtype
    assert dtype is not None
    return dtype


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype)


MODEL = "final_model"
ADAPTER = "adapter"
MERGED = "merged_model"


def weights_folder(recipe: Recipe) -> str:
    """Return the folder of the trained weights, the full model if there is one."""
    if recipe.section(SftModel).tune == "full":
        return MODEL
    return MERGED if recipe.section(LoraSection).merge_adapter_with_base else ADAPTER


def write_models(folder: Path, prepared: Prepared, recipe: Recipe, *, tokenizer: Any) -> None:
    """Write the model folders of a run."""
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
    """Return all weights, without duplicates of tied ones."""
    tied = tied_names(prepared.model)
    return {
        name: w for name, w in prepared.engine.weights.full_by_name().items() if name not in tied
    }
