"""Load a language model to decompose; nothing is downloaded or unpickled, missing weights raise."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from narrowcast.config import from_resolved
from narrowcast.config.problems import shortened, shown_path
from narrowcast.config.workload import require_modules
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.plain_files import expand_path
from narrowcast.runs.folder import RESOLVED, RunFolder
from narrowcast.training.checkpoints.export import tied_names
from narrowcast.workloads.decompose.targets import llama2c
from narrowcast.workloads.decompose.targets.language import (
    InputWindows,
    Language,
    TokenWindows,
    check_language,
    next_token_losses,
    read_windows,
)

WEIGHTS = "model.safetensors"
CHECKED_WINDOWS = 4
"""Held-out windows that a model is checked on before it is decomposed."""

_Loaded = TypeVar("_Loaded")


def language_target(
    name: str, *, text: Sequence[str], length: int, device: torch.device | str
) -> Language:
    """Load and check a language model and its text; an lm run without `text` uses its own."""
    device, path = torch.device(device), expand_path(name)
    find = find_run if (path / RESOLVED).is_file() else find_model
    language = find(name, path, text=text, length=length, device=device)
    language.target.requires_grad_(False).eval()
    if device.type != "meta":
        language = replace(language, target=language.target.to(device))
        _check(language)
    return language


@torch.no_grad()
def _check(language: Language) -> None:
    windows = language.held_out
    tokens = windows.__getitems__(list(range(min(CHECKED_WINDOWS, len(windows)))))
    tokens = tokens.to(language.device)
    raw = language.target(tokens)
    logits = raw if language.output is None else getattr(raw, language.output)
    cross_entropy = next_token_losses(logits, tokens).double().mean().item()
    check_language(language.name, cross_entropy=cross_entropy, vocabulary=language.vocabulary)


def find_run(
    name: str, path: Path, *, text: Sequence[str], length: int, device: torch.device
) -> Language:
    """Return the model of a finished lm run, and `text` in its tokens, or the run's own."""
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
    return Language(
        name=name,
        target=task.model,
        output=None,
        vocabulary=embedding.num_embeddings,
        windows=InputWindows(task.train_data),
        digest=digest,
        length=length,
        device=device,
        token_text=_byte_text if resolved["data.tokenizer"]["value"] == "bytes" else "#{}".format,
    )


def _byte_text(token: int) -> str:
    return bytes([token]).decode(errors="replace") if token < 256 else f"#{token}"


def _check_tokens(name: str, resolved: Mapping[str, Any]) -> None:
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


def find_model(
    name: str, path: Path, *, text: Sequence[str], length: int, device: torch.device
) -> Language:
    """Return the model of a folder or file in fp32, and the text in its tokens."""
    require_modules(["transformers"], of=f"model.path={name}", install="narrowcast[sft]")
    encode: Callable[[str], list[int]]
    token_text: Callable[[int], str]
    if path.is_dir() and (small := llama2c.files_in(path)) is not None:
        model = llama2c.read_model(small[0])
        pieces = llama2c.SentencePieces(small[1])
        encode, token_text = pieces.encode, pieces.token_text
        if device.type == "meta":
            model = model.to(device)
    else:
        model, encode, token_text = _of_transformers(name, path, device)
    config = model.config
    positions = getattr(config, "max_position_embeddings", None) or length
    if length > positions:
        raise ConfigError(
            f"data.length must be at most {positions}, the context length of model.path={name}, "
            f"got {length}. Write data.length={positions}."
        )
    config.use_cache = False
    # transformers knows the loss of some, such as GPT-2, by no name, and would say so on the way.
    model.loss_type = model.loss_type or "ForCausalLM"
    vocabulary = model.get_input_embeddings().num_embeddings
    if device.type == "meta":
        nothing = TokenWindows(np.zeros(0, dtype=np.int32), length)
        windows, digest = nothing, ""
    else:
        windows, digest = read_windows(text, encode, length=length, vocabulary=vocabulary)
    return Language(
        name=name,
        target=model,
        output="logits",
        vocabulary=vocabulary,
        windows=windows,
        digest=digest,
        length=length,
        device=device,
        token_text=token_text,
    )


def _of_transformers(
    name: str, path: Path, device: torch.device
) -> tuple[Any, Callable[[str], list[int]], Callable[[int], str]]:
    import transformers

    auto: Any = transformers

    options: dict[str, Any] = {"local_files_only": True}
    if path.suffix == ".gguf":
        require_modules(["gguf", "accelerate"], of=f"model.path={name}", install="gguf accelerate")
        folder, options["gguf_file"] = path.parent, path.name
        there = path.is_file()
    else:
        folder, there = path, (path / "config.json").is_file()
    if not there:
        raise ConfigError(
            f"model.path={name} has no model. Give the folder of an lm run, one with a config.json "
            "and .safetensors files as written by save_pretrained of transformers, a .gguf file, "
            "or a llama2.c folder."
        )
    if device.type == "meta":
        config = _tried(lambda: auto.AutoConfig.from_pretrained(folder, **options), name)
        with device:
            shapes = _tried(lambda: auto.AutoModelForCausalLM.from_config(config), name)
        return shapes, lambda text: [], str
    tokenizer = _tried(lambda: auto.AutoTokenizer.from_pretrained(folder, **options), name)
    safe = {} if "gguf_file" in options else {"use_safetensors": True}
    model, info = _tried(
        lambda: auto.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **options, **safe
        ),
        name,
    )
    if lacking := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model.path={name}: the files have no {lacking[0]}, so it would be randomly "
            "initialised. Give the folder of a complete model."
        )

    def encode(text: str) -> list[int]:
        with _quiet():  # it warns of texts longer than the model reads at once
            tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def token_text(token: int) -> str:
        text: str = tokenizer.decode([token])
        return text

    return model, encode, token_text


def _tried(load: Callable[[], _Loaded], name: str) -> _Loaded:
    try:
        with _quiet():
            return load()
    except ImportError as error:
        raise UnsupportedError(
            f"model.path={name} needs a package that is not installed: {_line(error)}."
        ) from error
    except Exception as error:  # whatever transformers makes of strange files
        raise ConfigError(
            f"model.path={name} cannot be loaded: {_line(error)}. Give a folder that "
            "AutoModelForCausalLM.from_pretrained of transformers loads."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300)
