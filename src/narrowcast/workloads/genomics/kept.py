"""What a run folder says of its network, so that another run or a prediction can go on with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.plain_files import path_of, read_plain
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import Pool

FILE = "genomics.json"
WEIGHTS = "model.safetensors"
LARGEST = 2**24
"""Bytes of that file."""


@final
@dataclass(frozen=True, kw_only=True)
class Kept:
    """A network without its weights: its shape, its tokens, and what it predicts."""

    config: GenomicConfig
    alphabet: str
    tokenizer: str
    kmer: int
    overlap: int
    task: str
    target: str
    classes: tuple[str, ...]
    pairs: bool
    pool: Pool
    max_length: int
    centre: float = 0.0
    spread: float = 1.0

    def write(self, folder: Path) -> None:
        """Write it beside the weights."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_kept(name: str) -> tuple[Kept, Path]:
    """Return what a run folder says of its network, and the folder."""
    folder = path_of(name)
    path = folder / FILE
    try:
        content = read_plain(path, most=LARGEST)
    except OSError as error:
        raise RecipeError(
            f"{shown_path(path)} cannot be read ({error.strerror}); give the folder of a finished "
            "run of genomics, as `narrowcast genomics pretrain` makes one"
        ) from error
    try:
        return TypeAdapter(Kept).validate_json(content, strict=True), folder
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{shown_path(path)} is damaged: {where}{': ' if where else ''}{first['msg']}"
        ) from error
    except RecipeError as error:  # numbers that no network has
        raise CheckpointError(f"{shown_path(path)} is damaged: {error}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a finished run, on the CPU."""
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise RecipeError(
            f"{shown_path(path)} is not there: the run has not ended; narrowcast resume "
            f"{shown_path(folder)}"
        ) from error
    except Exception as error:  # what safetensors raises of a damaged file has many names
        raise CheckpointError(f"{shown_path(path)} is damaged: {error}") from error


def load_into(network: torch.nn.Module, weights: dict[str, Tensor], *, head: bool) -> None:
    """Give a network the weights of another: all of them, or those of its backbone."""
    own = network.state_dict()
    wanted = {key for key in own if head or key.startswith("backbone.")}
    missing = sorted(key for key in wanted if key not in weights)
    wrong = [key for key in wanted - set(missing) if own[key].shape != weights[key].shape]
    if missing or wrong:
        what = f"{missing[0]} is missing" if missing else f"{wrong[0]} has another shape"
        raise CheckpointError(f"the weights do not fit what {FILE} says of them: {what}")
    with torch.no_grad():
        for key in wanted:
            own[key].copy_(weights[key])
