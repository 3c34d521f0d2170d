"""A causal language model and its tokenizer, from a folder, a .gguf file or the Hub.

Nothing is unpickled. Missing weights raise; transformers would initialise them randomly.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from narrowcast.config.problems import shortened
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.fp8_groups import BLOCK, widen_rows
from narrowcast.workloads.sft.data.templates import special_texts
from narrowcast.workloads.sft.settings import TINY

CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""
_Loaded = TypeVar("_Loaded")
GGUF = ".gguf"
ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
SCALE = "_scale_inv"
"""After the name of a weight in e4m3, that of its scales."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def tiny_tokenizer() -> Any:
    """Return a byte tokenizer with three special tokens and a chat template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",  # not a secret
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config() -> Any:
    """Return the config: four layers of width 128, a million parameters."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,  # near 1 / sqrt(128); with 0.02 no sum is right at step 200
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )


class ModelLocation(NamedTuple):
    """Where a model is."""

    folder: str
    """A folder, or a name on the Hub."""
    gguf: str | None = None
    """The file in that folder, if any."""

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def locate_model(name: str) -> ModelLocation:
    """Return where a model is, or raise."""
    path = Path(name).expanduser()
    result = _kind(path)
    if result == "folder":
        return _in_folder(name, path)
    if path.suffix == GGUF:
        if result != "file":
            raise ConfigError(f"model.path={name} does not exist.")
        return ModelLocation(folder=str(path.parent), gguf=path.name)
    if result == "file":
        raise ConfigError(
            f"model.path={name} is a file. Give the folder that contains config.json, or a .gguf "
            "file."
        )
    if name.startswith(".") or not ON_THE_HUB.fullmatch(name):
        raise ConfigError(
            f"model.path={name} does not exist. Give a folder with a model, a .gguf file, a name "
            f"on the Hugging Face Hub as owner/name, or {TINY}."
        )
    return ModelLocation(folder=name)


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, eos_token: str | None = None
) -> Any:
    """Return the tokenizer of a model, optionally with another eos token."""
    if name == TINY:
        tokenizer = tiny_tokenizer()
    else:
        from transformers import AutoTokenizer

        what = f"the tokenizer of model.path={name}"
        tokenizer = _from_pretrained(AutoTokenizer, name, what, trust_remote_code)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        # For some families transformers silently creates an empty one.
        raise ConfigError(
            f"model.path={name} has no working tokenizer. Put tokenizer.json and "
            "tokenizer_config.json next to config.json."
        )
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            known = ", ".join(sorted(special_texts(tokenizer)))
            raise ConfigError(
                f"model.eos_token must be a token of the tokenizer, got {eos_token}. Its special "
                f"tokens are {shortened(known, 300)}."
            )
        tokenizer.eos_token = eos_token
    return tokenizer


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a model."""
    if name == TINY:
        return tiny_config()
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, name, f"model.path={name}", trust_remote_code)


def _from_pretrained(kind: Any, name: str, what: str, trust_remote_code: bool) -> Any:
    at = locate_model(name)
    options = {"trust_remote_code": trust_remote_code, **at.options}
    return _loaded(lambda: kind.from_pretrained(at.folder, **options), what)


def load_model(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return a causal language model in `dtype`, or that of its files; only shapes on meta."""
    import transformers

    causal: Any = transformers.AutoModelForCausalLM
    device = torch.device(device)
    config = load_config(name, trust_remote_code=trust_remote_code)
    stored = dtype or config.dtype or torch.float32
    blocks = _quantization(config) if is_block_scaled(config) else None
    if blocks is not None:
        del config.quantization_config  # transformers has layers of its own for these weights
    if name == TINY or device.type == "meta":
        known = {key: options[key] for key in ("attn_implementation",) if key in options}
        with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
            torch.manual_seed(seed)
            model = _loaded(
                lambda: causal.from_config(
                    config, dtype=stored, trust_remote_code=trust_remote_code, **known
                ),
                f"model.path={name}",
            )
        return model.to(device).train()
    location = locate_model(name)
    kind = causal
    if blocks is None:
        options |= {"trust_remote_code": trust_remote_code, **location.options}
        options["use_safetensors"] = None if location.gguf else True
    else:
        with torch.device("meta"):
            kind = type(causal.from_config(config, trust_remote_code=trust_remote_code))
        values = _dequantized(name, location, blocks, dtype=stored)
        options |= {"config": config, "state_dict": values}
    loaded: tuple[Any, Any] = _loaded(
        lambda: kind.from_pretrained(
            location.folder if blocks is None else None,
            dtype=stored,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to learn which; they raise below
            **options,
        ),
        f"model.path={name}",
    )
    model, info = loaded
    _check_weights_exist(name, info)
    if location.gguf is not None:
        _forget_gguf(model)
    if blocks is not None:
        kinds: Any = transformers.GenerationConfig
        with contextlib.suppress(OSError):  # not every model has one
            model.generation_config = kinds.from_pretrained(location.folder)
    return (model if getattr(model, "is_quantized", False) else model.to(device)).train()


def is_block_scaled(config: Any) -> bool:
    """Return whether a model's files have e4m3 weights with scales, as those of DeepSeek-V3 do."""
    return _quantization(config).get("quant_method") == "fp8"


def _quantization(config: Any) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None) or {}
    return dict(settings) if isinstance(settings, dict) else dict(settings.to_dict())


class BlockScaled(NamedTuple):
    """A weight as a file has it."""

    codes: torch.Tensor
    scale: torch.Tensor  # one per 128×128 block

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, rounded once to a dtype."""
        return widen_rows(self.codes, self.scale, dtype)


def block_scaled_weights(name: str, config: Any) -> dict[str, BlockScaled]:
    """Return the e4m3 weights of a model's files by name, or raise if they have other scales."""
    weights: dict[str, BlockScaled] = {}
    for file in _weight_files(locate_model(name)):
        weights |= _read_blocks(name, file, _quantization(config))
    return weights


def empty_blocks(weight: torch.Tensor) -> BlockScaled:
    """Return codes and scales for a weight without values."""
    sides = [-(-side // BLOCK) for side in weight.shape]
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    return BlockScaled(codes, torch.empty(sides, device=weight.device))


def _dequantized(
    name: str, at: ModelLocation, settings: dict[str, Any], *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the weights of a model's files, those in e4m3 in another dtype."""
    from safetensors import safe_open

    values: dict[str, torch.Tensor] = {}
    for file in _weight_files(at):
        wide = {key: each.wide(dtype) for key, each in _read_blocks(name, file, settings).items()}
        with safe_open(file, "pt") as opened:
            keys = [key for key in list(opened.keys()) if not key.endswith(SCALE)]
            values |= {key: wide.get(key, opened.get_tensor(key)) for key in keys}
    return values


def _weight_files(at: ModelLocation) -> list[Path]:
    folder = Path(at.folder)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(at.folder, allow_patterns=["*.safetensors", "*.json"]))
    return sorted(folder.glob("*.safetensors"))


def _read_blocks(name: str, file: Path, settings: dict[str, Any]) -> dict[str, BlockScaled]:
    from safetensors import safe_open

    size = settings.get("weight_block_size")
    if size is None or list(size) != [BLOCK, BLOCK]:
        raise UnsupportedError(
            f"model.path={name} must have e4m3 weights with one scale per {BLOCK}×{BLOCK} block, "
            f"got weight_block_size={size}. Use the 16-bit version of the model."
        )
    weights = {}
    with safe_open(file, "pt") as opened:
        keys = set(opened.keys())
        for key in sorted(key for key in keys if key.endswith(SCALE)):
            codes = opened.get_tensor(key.removesuffix(SCALE))
            scale = opened.get_tensor(key).float()
            needed = tuple(-(-side // BLOCK) for side in codes.shape)
            if codes.dtype != torch.float8_e4m3fn or scale.shape != needed:
                raise ConfigError(
                    f"{file}: {key} must have one scale per {BLOCK}×{BLOCK} block of an e4m3 "
                    f"matrix, got scales of shape {tuple(scale.shape)} for {codes.dtype} of shape "
                    f"{tuple(codes.shape)}."
                )
            bad = (codes.view(torch.uint8) & 0x7F == 0x7F).any() or not scale.isfinite().all()
            if bool(bad):
                raise ConfigError(f"{file}: {key} or its weight has inf or NaN. Copy it again.")
            weights[key.removesuffix(SCALE)] = BlockScaled(codes, scale)
    return weights


def context_length(model: Any) -> int | None:
    """Return the context length of a model, if it has one."""
    room = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return room if isinstance(room, int) and room > 0 else None


def _kind(path: Path) -> Literal["folder", "file", "nothing"]:
    try:
        return "folder" if path.is_dir() else "file" if path.exists() else "nothing"
    except (OSError, ValueError):  # an invalid file name
        return "nothing"


def _in_folder(name: str, path: Path) -> ModelLocation:
    matches = sorted(file.name for file in path.glob(f"*{GGUF}"))
    if (path / "config.json").is_file():
        if any(path.glob("*.safetensors")):
            return ModelLocation(folder=str(path))
        if any((path / each).exists() for each in PICKLED):
            raise ConfigError(
                f"model.path={name} has its weights in pytorch_model.bin, a pickle, which can run "
                "arbitrary code. Save the model as safetensors (save_pretrained of transformers "
                "does)."
            )
        if not matches:
            raise ConfigError(
                f"model.path={name} has a config.json but no weights. Put its .safetensors files "
                "next to it."
            )
    match matches:
        case [only]:
            return ModelLocation(folder=str(path), gguf=only)
        case [] if any(path.glob("tok*.bin")):
            raise UnsupportedError(
                f"model.path={name} is a llama2.c model, which fine-tuning and ica do not support. "
                "Convert it to transformers: call save_pretrained of the model and of its "
                "tokenizer."
            )
        case []:
            raise ConfigError(
                f"model.path={name} has no model: there is neither a config.json nor a .gguf file. "
                "Give a folder written by save_pretrained of transformers."
            )
        case _:
            raise ConfigError(
                f"model.path={name} has {len(matches)} models: {', '.join(matches)}. Write one, "
                f"such as model.path={path / matches[0]}."
            )


def _loaded(load: Callable[[], _Loaded], what: str) -> _Loaded:
    """Call a loader and raise one-line errors."""
    try:
        with quiet():
            return load()
    except ImportError as error:
        if "gguf" in str(error).lower():
            require_modules(["gguf", "accelerate"], of=what, install="gguf accelerate")
        raise UnsupportedError(
            f"{what} needs a package that is not installed: {_line(error)}."
        ) from error
    except Exception as error:  # anything transformers raises for bad files
        if _is_offline(error):
            raise UnsupportedError(
                f"{what} is not a local folder, and the Hugging Face Hub is not reachable or has "
                "no such model. Download the model on a machine with network access, and write "
                "model.path=FOLDER."
            ) from error
        raise ConfigError(
            f"{what} cannot be loaded: {_line(error)}. Give a folder that "
            "AutoModelForCausalLM.from_pretrained of transformers loads."
        ) from error


def _is_offline(error: BaseException) -> bool:
    signs = "connect to|couldn't connect|offline|not a valid model identifier|max retr"
    return re.search(signs, str(error).lower()) is not None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return shortened(text, 300)


def _check_weights_exist(name: str, info: Any) -> None:
    lacking = [*info["missing_keys"], *(each[0] for each in info["mismatched_keys"])]
    if lacking:
        more = f" and {len(lacking) - 1:,} others" if len(lacking) > 1 else ""
        raise ConfigError(
            f"model.path={name}: the files have no {sorted(lacking)[0]}{more}, or not in the right "
            "shape, so it would be randomly initialised. Give the folder of a complete model."
        )


def _forget_gguf(model: Any) -> None:
    """Make a model from .gguf saveable: transformers 5.22 raises for quantized ones."""
    if "quantization_config" in model.config.__dict__:
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers."""
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
