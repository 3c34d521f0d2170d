"""Language models that others trained: of transformers, in a .gguf file, or of llama2.c.

Nothing is fetched, nothing is unpickled, and nothing is made up: a weight that the files lack is an
error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from narrowcast.config.problems import shortened
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.decompose.targets import llama2c
from narrowcast.workloads.decompose.targets.windows import (
    LanguageTarget,
    TokenWindows,
    read_windows,
)

_Loaded = TypeVar("_Loaded")


def find_model(
    name: str, path: Path, *, text: Sequence[str], length: int, device: torch.device
) -> LanguageTarget:
    """Return the model of a folder or file, in fp32, and the text as its tokenizer cuts it."""
    require_modules(["transformers"], of=f"model.path={name}", install="narrowcast[sft]")
    encode: Callable[[str], list[int]]
    if path.is_dir() and (small := llama2c.files_in(path)) is not None:
        model = llama2c.read_model(small[0])
        encode = llama2c.SentencePieces(small[1]).encode
        if device.type == "meta":
            model = model.to(device)
    else:
        model, encode = _of_transformers(name, path, device)
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
    return LanguageTarget(
        model=model, output="logits", vocabulary=vocabulary, windows=windows, digest=digest
    )


def _of_transformers(
    name: str, path: Path, device: torch.device
) -> tuple[Any, Callable[[str], list[int]]]:
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
            return _tried(
                lambda: auto.AutoModelForCausalLM.from_config(config), name
            ), lambda text: []
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

    return model, encode


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
