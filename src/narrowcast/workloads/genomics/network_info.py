"""The description of a network in a run folder, and its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.plain_files import expand_path, read_plain
from narrowcast.runs import RunFolder
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import Pool
from narrowcast.workloads.genomics.models.linear import Features
from narrowcast.workloads.genomics.published.transformer import merged_lora
from narrowcast.workloads.genomics.settings import TaskName

FILE = "genomics.json"
WEIGHTS = "model.safetensors"
LINEAR_WEIGHTS = "linear.safetensors"
PUBLISHED = "published"
"""Folder with the config and tokenizer of a published transformer."""
LARGEST = 2**24
"""Maximum bytes of that file."""


@final
@dataclass(frozen=True, kw_only=True)
class NetworkInfo:
    """A network without its weights: shape, tokenizer and target."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    config: GenomicConfig
    alphabet: Literal["dna", "rna", "protein"]
    tokenizer: Literal["byte", "kmer"]
    kmer: int
    overlap: int
    task: TaskName
    target: Literal["class", "labels", "value"]
    classes: tuple[str, ...]
    pairs: bool
    pool: Pool
    max_length: int
    centre: float = 0.0
    spread: float = 1.0
    both_strands: bool = False
    """Whether predictions are means over both strands."""
    linear: Features | None = None
    """What the linear model in LINEAR_WEIGHTS counts, if predictions combine it."""
    mix: tuple[float, float] = (1.0, 0.0)
    """Weights of the outputs of the network and of the linear model."""
    lora_scale: float = 0.0
    """Factor of the LoRA adapters in the weights; 0: there are none."""

    def write(self, folder: Path) -> None:
        """Write it next to the weights."""
        RunFolder(folder).write_json(FILE, asdict(self))


_SHAPE = TypeAdapter(NetworkInfo)


def read_network_info(name: str) -> tuple[NetworkInfo, Path]:
    """Return the description of a run's network, and the folder."""
    folder = expand_path(name)
    path = folder / FILE
    try:
        stored = _SHAPE.validate_json(read_plain(path, most=LARGEST), strict=True)
    except OSError as error:
        raise ConfigError(
            f"{shown_path(path)} cannot be read ({error.strerror}). Give the folder of a finished "
            "genomics run, such as one of `narrowcast genomics pretrain`."
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{shown_path(path)} is damaged: {where}{': ' if where else ''}{first['msg']}."
        ) from error
    except ConfigError as error:  # a network that cannot be
        raise CheckpointError(f"{shown_path(path)} is damaged: {error}") from error
    return stored, folder


def read_weights(folder: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """Return the weights of a finished run on the CPU."""
    path = folder / name
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{shown_path(path)} does not exist because the run is not finished. Run narrowcast "
            f"resume {shown_path(folder)}."
        ) from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{shown_path(path)} is damaged: {error}.") from error


def read_run(stored: NetworkInfo, folder: Path) -> dict[str, Tensor]:
    """Return the weights of a finished run, with its adapters merged."""
    weights = read_weights(folder)
    return merged_lora(weights, stored.lora_scale) if stored.lora_scale else weights


def load_into(network: torch.nn.Module, weights: dict[str, Tensor], *, head: bool) -> None:
    """Copy weights into a network: all of them, or those of the backbone."""
    own = network.state_dict()
    wanted = {key for key in own if head or key.startswith("backbone.")}
    missing = sorted(key for key in wanted if key not in weights)
    wrong = [key for key in wanted - set(missing) if own[key].shape != weights[key].shape]
    if missing or wrong:
        what = f"{missing[0]} is missing" if missing else f"{wrong[0]} has another shape"
        raise CheckpointError(f"The weights do not match {FILE}: {what}.")
    with torch.no_grad():
        for key in wanted:
            own[key].copy_(weights[key])
