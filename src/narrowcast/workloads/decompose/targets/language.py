"""Language models to decompose, and windows of their text."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.config.files import matching
from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, read_plain, stat_or_none
from narrowcast.runs.environment import host_memory_bytes
from narrowcast.training.checkpoints.data_identity import fingerprint

LEARNT_NATS = 0.1
"""Least gain over guessing, as a share of log(vocabulary); word frequencies alone give a third."""
COPIES = 8
"""Of a text that there may be at once: as bytes, as text, and as the tokens of either in lists."""
HELD_OUT_EVERY = 20
"""Every so many windows one is held out."""

Tokens = npt.NDArray[np.int32]


class Numbered(Protocol):
    """Windows by number."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitems__(self, indices: list[int], /) -> Tensor:
        """Return tokens (windows, length), int64, on the CPU."""
        ...


@final
@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Stretches of so many tokens, one after the other."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitems__(self, indices: list[int]) -> Tensor:
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.length
        return torch.from_numpy(self.tokens[starts + np.arange(self.length)].astype(np.int64))


@final
@dataclass(frozen=True, eq=False)
class InputWindows:
    """What a language model of another workload is fed: the first of each pair it is given."""

    pairs: Any

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, indices: list[int]) -> Tensor:
        tokens, _ = self.pairs.__getitems__(indices)
        assert isinstance(tokens, Tensor)
        return tokens


@final
@dataclass(frozen=True, eq=False)
class ChosenWindows:
    """Some of other windows."""

    windows: Numbered
    chosen: range | list[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.windows.__getitems__([self.chosen[index] for index in indices])


def split(windows: Numbered) -> tuple[ChosenWindows, ChosenWindows]:
    """Return the windows to train on, and some from everywhere in the text to evaluate on."""
    count = len(windows)
    every = min(HELD_OUT_EVERY, max(count, 1))
    train = [number for number in range(count) if number % every != every - 1]
    return ChosenWindows(windows, train), ChosenWindows(windows, range(every - 1, count, every))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Language:
    """A frozen language model in fp32 to decompose, and windows of its text."""

    name: str
    target: Any
    """Takes tokens (batch, length)."""
    output: str | None
    """The attribute of its result with the logits; None: the result itself."""
    vocabulary: int
    windows: Numbered
    digest: str
    """Identifies the text."""
    length: int
    device: torch.device
    token_text: Callable[[int], str] = "#{}".format
    """Returns the text of a token; its number if the tokenizer is not known."""
    divergence: ClassVar[Literal["mse", "kl"]] = "kl"
    batch_dim: ClassVar[int] = 0
    unit: ClassVar[str] = "token"
    sites: ClassVar[Mapping[str, int]] = {}
    tied: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def train(self) -> ChosenWindows:
        """Windows to train on."""
        return split(self.windows)[0]

    @cached_property
    def held_out(self) -> ChosenWindows:
        """Windows to evaluate on."""
        return split(self.windows)[1]

    def train_data(self, batch_size: int) -> ChosenWindows:
        return self.train

    def shown(self, inputs: Tensor) -> Tensor:
        return inputs

    def judged_on(self, number: int, count: int) -> Tensor:
        """Return a batch of held-out windows; if there are few, they repeat."""
        windows = self.held_out
        numbers = [(number * count + each) % len(windows) for each in range(count)]
        return windows.__getitems__(numbers).to(self.device)


def read_windows(
    sources: Sequence[str], encode: Callable[[str], list[int]], *, length: int, vocabulary: int
) -> tuple[TokenWindows, str]:
    """Cut the text of files into windows; return them and their fingerprint."""
    tokens = np.asarray(encode(_text(sources)), dtype=np.int32)
    windows = TokenWindows(tokens, length)
    if len(windows) < 2:
        raise ConfigError(
            f"data.text must have at least two windows of data.length={length}, one to train on "
            f"and one to evaluate on, got {len(tokens):,} tokens ({len(windows)} windows). Give "
            "more text, or a smaller data.length."
        )
    if (largest := int(tokens.max())) >= vocabulary:
        raise ConfigError(
            f"The tokenizer returns token {largest} for data.text, but the model has {vocabulary} "
            "tokens. Use the tokenizer the model was trained with."
        )
    return windows, fingerprint(tokens)


def _text(sources: Sequence[str]) -> str:
    room = (host_memory_bytes() or sys.maxsize) // COPIES
    texts = []
    for path in (path for source in sources for path in _files(source)):
        try:
            content = read_plain(path, most=room)
            texts.append(content.decode("utf-8-sig"))
        except OSError as error:
            raise ConfigError(
                f"data.text: {shown_path(path)} cannot be read: {error.strerror}."
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"data.text: {shown_path(path)} is not UTF-8 text: byte "
                f"{content[error.start]:#04x} at {error.start}."
            ) from error
        room -= len(content)
    if not any(text.strip() for text in texts):
        raise ConfigError("data.text is empty. Write data.text=[FILE], paths or globs.")
    return "\n".join(texts)


def _files(source: str) -> list[Path]:
    path = expand_path(source)
    try:
        # A path that exists is meant as it stands, whatever * or [ it contains.
        matches = [path] if stat_or_none(path) is not None else matching(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.text: {shown_path(source)} cannot be read: {error}.") from error
    if not matches:
        raise ConfigError(f"data.text: {shown_path(source)} does not exist.")
    return matches


def check_language(name: str, *, cross_entropy: float, vocabulary: int) -> None:
    """Raise for a language model that predicts no better than chance."""
    even = math.log(vocabulary)
    if not cross_entropy <= (1 - LEARNT_NATS) * even:
        raise ConfigError(
            f"model.path={name} predicts this text no better than chance: {cross_entropy:.2f} nats "
            f"per token, and chance is {even:.2f}. Give a trained model, and text for its "
            "tokenizer."
        )


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of each token but the first of a row: (batch, length - 1), fp32."""
    flat = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return flat.view(tokens.shape[0], -1)
