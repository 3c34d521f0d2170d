"""Text to train and validate on, its tokens, and windows of them."""

import errno
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowcast.config.files import matching
from narrowcast.config.problems import Problems, shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, read_plain, stat_or_none
from narrowcast.runs.environment import host_memory_bytes
from narrowcast.workloads.lm.settings import TOPICS

STRETCHES = 10
"""Each part of a split has a piece of every tenth: a text changes its subject as it goes."""
COPIES = 4
"""Of a text that there are at once while it is cut: as bytes, as text, joined, as tokens."""
SYNTHETIC_TOKENS = 2**22
"""Random tokens made for a speed run: 4,096 windows of 1,024, 8 MiB."""

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


class Split(NamedTuple):
    """One text in two parts that share nothing."""

    train: str
    validation: str


def read_text(sources: Sequence[str]) -> str:
    """Join files by path or glob, and Python's help for `TOPICS`; raise all problems at once."""
    texts: list[str] = []
    problems = Problems()
    room = (host_memory_bytes() or sys.maxsize) // COPIES
    for source in sources:
        if source == TOPICS:
            texts.append(_topics())
            continue
        for path in _matches(source, problems):
            try:
                texts.append(_read(path, most=room))
                room -= len(texts[-1])
            except ConfigError as error:
                problems.add(str(error))
    if not sources:
        problems.add("no source is given")
    if problems:
        raise ConfigError(
            "\n".join(f"data.text: {line}" for line in problems.lines())
            + f"\nWrite data.text=FILE, a path or glob of UTF-8 text, or data.text={TOPICS}."
        )
    return "\n".join(texts)


def split_text(text: str, *, validation_share: float) -> Split:
    """Keep the last `validation_share` of each tenth of `text` for validation."""
    train: list[str] = []
    validation: list[str] = []
    for number in range(STRETCHES):
        start = number * len(text) // STRETCHES
        end = (number + 1) * len(text) // STRETCHES
        cut = end - round((end - start) * validation_share)
        train.append(text[start:cut])
        validation.append(text[cut:end])
    return Split("".join(train), "".join(validation))


def _matches(source: str, problems: Problems) -> list[Path]:
    """Return the files of a path or glob, and add a problem if there are none."""
    path, shown = expand_path(source), shown_path(source)
    try:
        # A path that exists is meant as it stands, whatever * or [ it contains.
        if stat_or_none(path) is not None:
            return [path]
        matches = matching(path)
    except OSError as error:
        problems.add(f"{shown} cannot be read: {error.strerror}")
        return []
    except ValueError as error:  # of ** beside other characters
        problems.add(f"{shown}: {error}")
        return []
    if not matches:
        problems.add(f"{shown}: no such file")
    return matches


def _read(path: Path, *, most: int) -> str:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Write data.text={path}/*.txt for the files in it.")
    try:
        data = read_plain(path, most=most)
        # Some editors begin a file with a byte order mark; it is no part of the text.
        text = data.decode("utf-8-sig")
    except OSError as error:
        why = "; text is tokenized in memory and may use a quarter of it"
        text = f"{error.strerror}{why if error.errno == errno.EFBIG else ''}"
        raise ConfigError(f"{path} cannot be read: {text}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}. Convert it "
            "(iconv -f latin1 -t utf-8), or decompress it."
        ) from error
    if "\0" in text:
        raise ConfigError(f"{path} is a binary file: zero byte at {data.index(0)}.")
    if not text.strip():
        raise ConfigError(f"{path} is empty." if not data else f"{path} has only whitespace.")
    return text


def _topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            f"data.text={TOPICS} needs Python's help text (pydoc_data), which is not installed. "
            "Write data.text=FILE with a UTF-8 text file."
        ) from error
    # Topics quote each other: "compound statements" repeats every statement's own page. A paragraph
    # counts once, or validation would find what training has read.
    paragraphs = (part for topic in topics.values() for part in topic.split("\n\n"))
    return "\n\n".join(dict.fromkeys(part.strip("\n") for part in paragraphs if part.strip()))


class Tokenizer(Protocol):
    """Cut any text into tokens that join to exactly that text again."""

    @property
    def size(self) -> int:
        """How many tokens there are, counted from 0."""

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return how many bytes of UTF-8 each token stands for."""


class ByteTokenizer:
    """One token a byte: 256 tokens, nothing to train."""

    size = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        return np.ones(self.size, dtype=np.int64)


@dataclass(frozen=True)
class Windows:
    """Stretches of `length` tokens and their next tokens; every token is a target at most once."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, one token later, of several windows (windows, length)."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.length
        rows = torch.from_numpy(self.tokens[starts + np.arange(self.length + 1)].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def synthetic_tokens(vocab: int, *, seed: int) -> Tokens:
    """Draw tokens evenly from `vocab`: nothing to learn, and a step costs what real text costs."""
    drawn = np.random.default_rng(seed).integers(vocab, size=SYNTHETIC_TOKENS, dtype=np.int32)
    return drawn.astype(np.uint16) if vocab <= 2**16 else drawn
