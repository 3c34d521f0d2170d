"""Language models that this library trained: what a run trained is built by its own workload."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from narrowcast.config import from_resolved
from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs.folder import RESOLVED, RunFolder
from narrowcast.training.checkpoints.export import tied_names
from narrowcast.workloads.decompose.targets.windows import InputWindows, LanguageTarget

WEIGHTS = "model.safetensors"


def find_run(
    name: str, path: Path, *, text: Sequence[str], length: int, device: torch.device
) -> LanguageTarget:
    """Return what the run in a folder trained, with its weights, and text as its tokenizer cuts it.

    None is the text that it trained on.
    """
    from narrowcast.workloads import build_task, workload_sections

    resolved = RunFolder.open(path, needs=(RESOLVED,)).read_json(RESOLVED)
    match resolved.get("workload"):
        case {"value": "lm"}:
            pass
        case {"value": str(other)}:
            raise ConfigError(
                f"model.path={name} is a run of workload {other}, which cannot be decomposed. Give "
                "a run of lm, or the folder of a transformers model."
            )
        case _:
            raise CheckpointError(f"{shown_path(path / RESOLVED)} is damaged: it has no workload.")
    overrides = [f"data.length={length}"]
    if text:
        _check_tokens(name, resolved)
        overrides.append(f"data.text={json.dumps(list(text))}")
    recipe = from_resolved(resolved, overrides, sections=workload_sections).recipe
    on = device if device.type == "meta" else torch.device("cpu")
    task = build_task(recipe, device=on)
    if device.type != "meta":
        _load_run(path, task.model)
    embedding = task.model.get_submodule("embed")
    assert isinstance(embedding, nn.Embedding)
    digest = "" if device.type == "meta" or task.data_digest is None else task.data_digest()
    return LanguageTarget(
        model=task.model,
        output=None,
        vocabulary=embedding.num_embeddings,
        windows=InputWindows(task.train_data),
        digest=digest,
    )


def _check_tokens(name: str, resolved: Mapping[str, Any]) -> None:
    """Refuse other text where tokens were learnt from the run's own: they would be others."""
    match resolved.get("data.tokenizer"):
        case {"value": "bpe"}:
            raise ConfigError(
                f"model.path={name} has a tokenizer trained on its own text, so it is decomposed "
                "on that text. Leave data.text out."
            )


def _load_run(path: Path, model: nn.Module) -> None:
    file = path / WEIGHTS
    if not file.is_file():
        raise ConfigError(
            f"{shown_path(file)} does not exist because the run is not finished. Run narrowcast "
            f"resume {shown_path(path)}"
        )
    try:
        weights = load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{shown_path(file)} is damaged: {error}.") from error
    try:
        result = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of other shapes
        raise CheckpointError(
            f"{shown_path(file)} does not belong to this run: "
            f"{shortened(' '.join(str(error).split()), 300)}."
        ) from error
    if lacking := sorted({*result.missing_keys} - tied_names(model)):
        raise CheckpointError(f"{shown_path(file)} has no {lacking[0]}.")
