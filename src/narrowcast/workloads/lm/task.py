"""The task of predicting the next token: a GPT, its text, its loss, and how it is judged."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
from narrowcast.training.task import Batch, MapDataset
from narrowcast.workloads.lm.model import GPT, build_gpt, evaluating
from narrowcast.workloads.lm.settings import LmData, LmModel
from narrowcast.workloads.lm.text import read_text, split_text
from narrowcast.workloads.lm.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    Tokens,
    read_vocabulary,
)
from narrowcast.workloads.lm.windows import Windows, synthetic_tokens

BPE_TOKENS = 4096
"""What `tokenizer=bpe` learns where `model.vocab` does not say."""


@dataclass(frozen=True, kw_only=True)
class LmTask:
    """A GPT and the text it is trained and judged on."""

    model: GPT
    train_data: MapDataset
    validation_data: Windows
    tokenizer: Tokenizer | None
    """What cut the text; none for synthetic tokens, which stand for no text."""
    eval_windows: int
    batch_size: int
    device: torch.device

    @property
    def gemm_rows(self) -> int:
        """Tokens per micro-batch."""
        return self.batch_size * self.model.length

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the next tokens in nats, taken in fp32."""
        loss: Tensor = model(*batch)
        return loss

    def items(self, batch: Batch) -> int:
        """Count the tokens `batch` asks to predict."""
        return batch[1].numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return nats a token, perplexity and, where there is text, bits a byte of held-out text.

        Takes the same windows every time, spread over all of the validation text; every token
        counts alike. Waits for the device.
        """
        nats, tokens, text_bytes = 0.0, 0, 0
        lengths = None if self.tokenizer is None else self.tokenizer.byte_lengths()
        with torch.no_grad(), evaluating(model):
            for batch in self._validation_batches():
                on_device = tuple(tensor.to(self.device) for tensor in batch)
                losses = model(*on_device, reduction="none")
                # In float64, which not every device has: a million fp32 terms lose digits.
                nats += losses.cpu().double().sum().item()
                tokens += self.items(batch)
                text_bytes += 0 if lengths is None else int(lengths[batch[1].numpy()].sum())
        loss = nats / tokens
        perplexity = torch.tensor(loss, dtype=torch.float64).exp().item()
        metrics = {"loss": loss, "perplexity": perplexity}
        if lengths is not None:
            metrics["bits_per_byte"] = nats / text_bytes / math.log(2)
        return metrics

    def _validation_batches(self) -> Iterator[Batch]:
        available = len(self.validation_data)
        count = min(self.eval_windows, available)
        chosen = [number * available // count for number in range(count)]
        for first in range(0, count, self.batch_size):
            yield self.validation_data.__getitems__(chosen[first : first + self.batch_size])


def build_task(recipe: Recipe, *, device: torch.device) -> LmTask:
    """Read and cut the text, and build the model on `device`; on the meta device read no text."""
    data, settings = recipe.data, recipe.model
    assert isinstance(data, LmData)
    assert isinstance(settings, LmModel)
    vocab = _vocab(data, settings)
    if device.type == "meta":
        nothing: Tokens = np.empty(0, dtype=np.uint16)
        train, validation, tokenizer = nothing, nothing, None
    elif data.synthetic:
        tokens = synthetic_tokens(vocab, seed=recipe.seed)
        cut = round(len(tokens) * (1 - data.validation_share))
        train, validation, tokenizer = tokens[:cut], tokens[cut:], None
    else:
        train, validation, tokenizer = _tokenised(data, vocab=vocab)
    if device.type != "meta":
        _require_windows(len(train), len(validation), length=data.length)
    return LmTask(
        model=build_gpt(settings, vocab=vocab, length=data.length, seed=recipe.seed, device=device),
        train_data=Windows(train, data.length),
        validation_data=Windows(validation, data.length),
        tokenizer=tokenizer,
        eval_windows=data.eval_windows,
        batch_size=recipe.batch_size,
        device=device,
    )


def _vocab(data: LmData, settings: LmModel) -> int:
    """Return how many tokens the model knows, and refuse fewer than its tokenizer has."""
    if data.synthetic:
        return settings.vocab or ByteTokenizer.size
    known = data.tokenizer in ("bytes", "bpe")
    fewest = ByteTokenizer.size if known else len(read_vocabulary(Path(data.tokenizer)))
    if settings.vocab is None:
        return BPE_TOKENS if data.tokenizer == "bpe" else fewest
    if settings.vocab < fewest:
        raise RecipeError(
            f"model.vocab={settings.vocab}: data.tokenizer={data.tokenizer} has {fewest} tokens "
            f"or more; write model.vocab={fewest}, or leave it out"
        )
    return settings.vocab


def _tokenised(data: LmData, *, vocab: int) -> tuple[Tokens, Tokens, Tokenizer]:
    """Return the tokens to train on, those to validate on, and what made them."""
    text = split_text(read_text(data.sources), validation_share=data.validation_share)
    tokenizer: Tokenizer
    match data.tokenizer:
        case "bytes":
            tokenizer = ByteTokenizer()
        case "bpe":
            # From the training text alone: merges learnt on the rest would tell about it.
            tokenizer = BpeTokenizer.trained(text.train, size=vocab)
        case folder:
            tokenizer = BpeTokenizer.loaded(Path(folder))
    return tokenizer.encode(text.train), tokenizer.encode(text.validation), tokenizer


def _require_windows(train: int, validation: int, *, length: int) -> None:
    shorter = min(train, validation)
    if shorter > length:
        return
    smaller = f", or write data.length={shorter - 1}" if shorter > 1 else ""
    raise RecipeError(
        f"data.length={length}: the text gives {train} tokens to train on and {validation} to "
        f"validate on, and a sample takes {length + 1}; give more text in data.text{smaller}"
    )
