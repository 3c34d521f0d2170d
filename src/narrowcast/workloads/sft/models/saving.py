"""What is left of a run: folders that `from_pretrained` of transformers and peft load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.numerics import plain_format
from narrowcast.workloads.sft.models.loading import quiet


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
    """Write a whole model, by the names its own class has for its weights."""
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
    """Write the adapters of a model of peft, with all their digits."""
    with quiet():
        model.save_pretrained(folder, state_dict=dict(weights), save_embedding_layers=False)
        tokenizer.save_pretrained(folder)


def save_merged(
    base: Any, adapter: Path, folder: Path, *, tokenizer: Any, dtype: torch.dtype
) -> None:
    """Write a model with the adapters of a folder merged into it.

    `base` is the model as it was frozen, in fp32: what is rounded is the sum, once.
    """
    from peft import PeftModel

    with quiet():
        merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
        merged = merged.to(dtype)
        merged.config.dtype = dtype
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def saved_dtype(name: str, config: Any) -> torch.dtype:
    """Return what a model is saved in: the format of that name, or what its files had."""
    if name == "auto":
        dtype: torch.dtype | None = config.dtype
        return dtype or torch.float32
    dtype = plain_format(name).dtype
    assert dtype is not None
    return dtype


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype)
