"""Perplexity of plain text in overlapping windows, which predict every token but the first once."""

import io
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.config.problems import Problems, shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import open_plain
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.data.sources import match_files

AT_ONCE = 2**26
"""Logits cast to fp32 at once: 256 MiB."""


class Text(NamedTuple):
    """A text and its path."""

    path: Path
    text: str


def read_texts(names: tuple[str, ...], *, most_bytes: int) -> list[Text]:
    """Return at least the first `most_bytes` bytes of each file; one error lists all problems."""
    problems, paths, matches = Problems(), list[Path](), list[Text]()
    for name in names:
        matched = match_files(name, problems, example="*.txt")
        paths += matched or ()
        if matched is None:
            problems.add(f"{shown_path(name)}: no such file")
    for path in dict.fromkeys(paths):
        try:
            matches.append(Text(path, _beginning(path, most_bytes)))
        except ConfigError as error:
            problems.add(str(error))
    if problems:
        lines = [f"eval_tasks.perplexity: {line}" for line in problems.lines()]
        advice = "Write eval_tasks.perplexity=FILE, a path or glob of UTF-8 text."
        raise ConfigError("\n".join([*lines, advice]))
    return matches


def _beginning(path: Path, most_bytes: int) -> str:
    shown = shown_path(path)
    try:
        with io.BufferedReader(open_plain(path, follow=True)) as file:
            data = file.read(most_bytes)
            # Complete a character that was cut.
            while data and (more := file.peek(1)[:1]) and more[0] & 0xC0 == 0x80:
                data += file.read(1)
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}. Convert "
            "it (iconv -f latin1 -t utf-8), or decompress it."
        ) from error
    if "\0" in text:
        raise ConfigError(f"{shown} is a binary file: zero byte at {data.index(0)}.")
    if not text.strip():
        raise ConfigError(f"{shown} has only whitespace." if data else f"{shown} is empty.")
    return text


class Perplexity(NamedTuple):
    """Perplexity of a text."""

    nats: float
    """Mean negative log-likelihood per predicted token."""
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats) if self.nats < 709 else math.inf


class Window(NamedTuple):
    """Tokens, of which the first `known` are not predicted."""

    tokens: tuple[int, ...]
    known: int


def make_windows(tokens: Sequence[int], *, length: int, overlap: int = 1) -> list[Window]:
    """Split a text into windows of `length` tokens that overlap by `overlap`."""
    if not 1 <= overlap < length:
        raise ConfigError(
            f"overlap must be between 1 and {length - 1} for windows of {length} tokens, got "
            f"{overlap}."
        )
    last = max(len(tokens) - overlap, 1)
    return [
        Window(tuple(tokens[start : start + length]), overlap if start else 1)
        for start in range(0, last, length - overlap)
    ]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, including those the tokenizer puts first."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[str],
    *,
    length: int,
    overlap: int = 1,
    tokens: int | None = None,
    batch_size: int = 1,
) -> Perplexity:
    """Return the perplexity of the first `tokens` tokens of each text; synchronises."""
    texts = [text] if isinstance(text, str) else text
    cut = [encode(tokenizer, each)[:tokens] for each in texts]
    windows = [w for each in cut for w in make_windows(each, length=length, overlap=overlap)]
    return perplexity_of_windows(model, windows, batch_size=batch_size)


@torch.no_grad()
def perplexity_of_windows(
    model: nn.Module, windows: Sequence[Window], *, batch_size: int = 1
) -> Perplexity:
    """Return the perplexity of windows, summed in fp64; synchronises."""
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with in_eval_mode(model):
        for batch in _batches(windows, batch_size):
            ids = torch.tensor([window.tokens for window in batch], device=device)
            known = torch.tensor([window.known for window in batch], device=device)
            total += _surprise(model(input_ids=ids, use_cache=False).logits, ids, known)
            count += sum(len(window.tokens) - window.known for window in batch)
    if not count:
        raise ConfigError(
            "The text has fewer than two tokens, so there is nothing to predict. Give a longer "
            "text."
        )
    return Perplexity(float(total) / count, count)


def _surprise(logits: Tensor, ids: Tensor, known: Tensor) -> Tensor:
    """Return the sum of negative log-likelihoods in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    step = max(AT_ONCE // logits.shape[-1], 1)
    for row, targets, first in zip(logits, ids, known.tolist(), strict=True):
        inputs, wanted = row[first - 1 : -1], targets[first:]
        for at in range(0, len(wanted), step):
            piece, goal = inputs[at : at + step].float(), wanted[at : at + step]
            each = nn.functional.cross_entropy(piece, goal, reduction="none")
            total += each.double().sum()
    return total


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Yield windows of equal length together, without padding."""
    ordered = sorted(windows, key=lambda window: -len(window.tokens))
    for _, group in groupby(ordered, key=lambda window: len(window.tokens)):
        same = list(group)
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]
