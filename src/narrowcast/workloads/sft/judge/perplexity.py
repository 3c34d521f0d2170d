"""Perplexity of plain text: how many tokens a model wavers between, on average.

A text is cut into windows that overlap. Every token but the first of the text is predicted once,
from the tokens of its window before it: at least `overlap` of them, at most `length` - 1.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.training.evaluation import in_eval_mode

AT_ONCE = 2**26
"""Numbers of logits that are brought to fp32 at once: 256 MiB."""


class Perplexity(NamedTuple):
    """What a model makes of a text."""

    nats: float
    """Per token that was predicted: the mean of the negative log-likelihood."""
    tokens: int
    """That were predicted."""

    @property
    def perplexity(self) -> float:
        """The exponential of that mean."""
        return math.exp(self.nats) if self.nats < 709 else math.inf


class Window(NamedTuple):
    """Tokens to give a model, of which the first `known` are not predicted."""

    tokens: tuple[int, ...]
    known: int


def make_windows(tokens: Sequence[int], *, length: int, overlap: int = 1) -> list[Window]:
    """Cut a text into windows of `length` tokens, each beginning with `overlap` of the one before.

    The last may be shorter.
    """
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
    """Return the tokens of a text, with what the tokenizer puts before any."""
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
    """Return the perplexity of the first `tokens` tokens of a text, or of each of several.

    No window reaches over two texts. Waits for the device.
    """
    texts = [text] if isinstance(text, str) else text
    cut = [encode(tokenizer, each)[:tokens] for each in texts]
    windows = [w for each in cut for w in make_windows(each, length=length, overlap=overlap)]
    return perplexity_of_windows(model, windows, batch_size=batch_size)


@torch.no_grad()
def perplexity_of_windows(
    model: nn.Module, windows: Sequence[Window], *, batch_size: int = 1
) -> Perplexity:
    """Return the perplexity of windows, summed in fp64. Waits for the device."""
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
    """Return the sum of the negative log-likelihoods of what is not known, in fp64."""
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
    """Yield windows of one length together, so that nothing has to be filled."""
    ordered = sorted(windows, key=lambda window: -len(window.tokens))
    for _, group in groupby(ordered, key=lambda window: len(window.tokens)):
        same = list(group)
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]
