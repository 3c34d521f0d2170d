"""Text as windows of tokens, by number: those that are decomposed on, and those that judge."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowcast.config.globs import matching
from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, read_plain, stat_or_none
from narrowcast.runs.environment import host_memory_bytes
from narrowcast.training.checkpoints.data_identity import fingerprint

COPIES = 8
"""Of a text that there may be at once: as bytes, as text, and as the tokens of either in lists."""
HELD_OUT_EVERY = 20
"""Every so many windows one is kept to judge on."""

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
        """Count the whole windows."""
        return len(self.tokens) // self.length

    def __getitems__(self, indices: list[int]) -> Tensor:
        """Return the windows of these numbers."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.length
        return torch.from_numpy(self.tokens[starts + np.arange(self.length)].astype(np.int64))


@final
@dataclass(frozen=True, eq=False)
class InputWindows:
    """What a language model of another workload is fed: the first of each pair it is given."""

    pairs: Any

    def __len__(self) -> int:
        """Count the windows."""
        return len(self.pairs)

    def __getitems__(self, indices: list[int]) -> Tensor:
        """Return the windows of these numbers."""
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
        """Count them."""
        return len(self.chosen)

    def __getitems__(self, indices: list[int]) -> Tensor:
        """Return the windows of these numbers."""
        return self.windows.__getitems__([self.chosen[index] for index in indices])


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageTarget:
    """A language model as it was found, and the windows of its text."""

    model: Any
    output: str | None
    """The attribute of its result that is its logits; none: the result is."""
    vocabulary: int
    windows: Numbered
    digest: str
    """Another one for other text."""


def split(windows: Numbered) -> tuple[ChosenWindows, ChosenWindows]:
    """Return the windows to decompose on, and some from everywhere that are kept to judge on."""
    count = len(windows)
    every = min(HELD_OUT_EVERY, max(count, 1))
    held_out = range(every - 1, count, every)
    stored = [number for number in range(count) if number % every != every - 1]
    return ChosenWindows(windows, stored), ChosenWindows(windows, held_out)


def read_windows(
    sources: Sequence[str], encode: Callable[[str], list[int]], *, length: int, vocabulary: int
) -> tuple[TokenWindows, str]:
    """Cut the text of files, by path or glob, into windows; return them and what identifies them.

    Fewer than two windows, one to decompose on and one to judge on, are an error.
    """
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
