"""The files of a published checkpoint, from a folder or the Hub, read without running code."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowcast.config.problems import shortened
from narrowcast.config.workload import require_modules
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.plain_files import expand_path, read_plain

Family: TypeAlias = Literal["esm", "dnabert2", "hyenadna"]
FAMILIES = "ESM-2, Nucleotide Transformer, DNABERT-2 and HyenaDNA"
CONFIG = "config.json"
LARGEST = 2**24
"""Maximum bytes of a config."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
CONVERT = (
    "Convert it: python -c \"import torch, safetensors.torch as s; w = torch.load('"
    "pytorch_model.bin', weights_only=True); s.save_file({k: v.clone() for k, v in w.items()}, "
    "'model.safetensors')\""
)


@final
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The folder of a published checkpoint."""

    name: str
    folder: Path
    family: Family
    config: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """Return all weights in the safetensors files, on the CPU."""
        files = sorted(self.folder.glob("*.safetensors"))
        if not files and any(self.folder.glob("*.bin")):
            raise ConfigError(
                f"model.path={self.name} has its weights in pytorch_model.bin, a pickle, which can "
                f"run arbitrary code. {CONVERT}"
            )
        if not files:
            raise ConfigError(
                f"model.path={self.name} has a {CONFIG} but no .safetensors file. Put the weights "
                f"next to it. If they are published as pytorch_model.bin only: {CONVERT}"
            )
        weights = dict[str, Tensor]()
        for file in files:
            try:
                weights |= load_file(file)
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{file} is damaged: {error}.") from error
        return weights

    def copy_description(self, folder: Path) -> None:
        """Copy the config and the tokenizer, so that predictions do not need the checkpoint."""
        folder.mkdir(exist_ok=True)
        for name in (CONFIG, *TOKENIZER_FILES):
            if (self.folder / name).is_file():
                (folder / name).write_bytes(read_plain(self.folder / name))


def find_checkpoint(name: str) -> Checkpoint | None:
    """Return the checkpoint of a folder or Hub name; None if the folder has no config.json."""
    folder = expand_path(name)
    if not folder.exists() and ON_THE_HUB.fullmatch(name):
        folder = _downloaded(name)
    elif not (folder / CONFIG).is_file():
        return None
    return read_checkpoint(folder, name=name)


def read_checkpoint(folder: Path, *, name: str) -> Checkpoint:
    """Return the checkpoint in a folder; raise if its architecture is not known."""
    try:
        config = json.loads(read_plain(folder / CONFIG, most=LARGEST))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG} must be a JSON object, got {type(config).__name__}.")
    return Checkpoint(name=name, folder=folder, family=_family(name, config), config=config)


def _family(name: str, config: dict[str, Any]) -> Family:
    """Return the architecture by what a config says of it."""
    kind = str(config.get("model_type", ""))
    # Nucleotide Transformer v2 has no model type.
    mapped = config.get("auto_map") or {}
    classes = " ".join([kind, *map(str, config.get("architectures") or []), *map(str, mapped)])
    code = " ".join(map(str, mapped.values())) if isinstance(mapped, dict) else ""
    if "caduceus" in f"{classes} {code}".lower():
        require_modules(["mamba_ssm"], of=f"model.path={name} (Caduceus)", install="mamba-ssm")
        raise UnsupportedError(
            f"model.path={name} is a Caduceus checkpoint. Its Mamba layers are code of the Hub, "
            f"which narrowcast does not run. Use one of {FAMILIES}."
        )
    if kind == "hyenadna" or "HyenaDNA" in classes:
        return "hyenadna"
    if kind == "bert" and ("alibi_starting_size" in config or "bert_layers" in code):
        return "dnabert2"
    if kind == "esm" or "Esm" in f"{classes} {code}":
        return "esm"
    raise UnsupportedError(
        f"model.path={name} must be one of {FAMILIES}, got model_type="
        f"{shortened(kind or 'none', 100)} in its {CONFIG}. Use another checkpoint, or leave "
        "model.path out to train a new network."
    )


def _downloaded(name: str) -> Path:
    """Return the folder of a snapshot from the Hub, or from its cache."""
    require_modules(["huggingface_hub"], of=f"model.path={name}", install="narrowcast[sft]")
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", CONFIG, *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # anything huggingface_hub raises without a network
        raise UnsupportedError(
            f"model.path={name} is not a local folder, and the Hugging Face Hub is not reachable "
            f"or has no such model: {shortened(' '.join(str(error).split()), 200)}. Download the "
            "checkpoint on a machine with network access, and write model.path=FOLDER."
        ) from error
