"""The task of predicting the next token: a GPT, its text, its loss, and its evaluation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import EvalBatches, Task, TextSamples
from narrowcast.workloads.lm import WORKLOAD
from narrowcast.workloads.lm.model import GPT, build_gpt, let_swell
from narrowcast.workloads.lm.sample import continue_all
from narrowcast.workloads.lm.settings import SYNTHETIC, LmData, LmModel, LmRehearsal, LmSamples
from narrowcast.workloads.lm.text import (
    ByteTokenizer,
    Tokenizer,
    Tokens,
    Windows,
    read_text,
    split_text,
    synthetic_tokens,
)

BPE_TOKENS = 4096
"""What `tokenizer=bpe` learns where `model.vocab` does not say."""

PROMPT = 32
"""Tokens of a held-out sample that the model continues."""
WAITING, LAUNCHING = 2.0, 0.05
"""Least cost of a pass for one more token, in passes of a micro-batch: on a GPU it waits for the
host, where training may replay graphs; on a CPU it costs little but its tokens."""

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Tokens, and those that come after each of them."""

LOSS, PERPLEXITY = Metric(name="loss"), Metric(name="perplexity")
BITS_PER_BYTE = Metric(name="bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A GPT and the text it is trained and evaluated on."""

    model: GPT
    train_data: Windows
    validation_data: Windows
    tokenizer: Tokenizer | None
    """What cut the text; none for synthetic tokens, which stand for no text."""
    eval_windows: int
    batch_size: int
    device: torch.device
    samples: LmSamples
    seed: int

    def task(self) -> Task:
        text = () if self.tokenizer is None else (BITS_PER_BYTE,)
        return Task(
            model=self.model,
            train_data=self.train_data,
            loss=self.loss,
            evaluate=self.evaluate,
            items=self.items,
            info=TaskInfo(unit="token", metrics=(LOSS, PERPLEXITY, *text)),
            gemm_rows=self.batch_size * self.model.length,
            held_out=self.held_out(),
            data_digest=self.data_digest,
            example=self.example,
            samples=self.text_samples(),
        )

    def example(self) -> Pair:
        tokens = torch.empty((self.batch_size, self.model.length), dtype=torch.int64, device="meta")
        return tokens, tokens

    def loss(self, model: nn.Module, batch: Pair) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def items(self, batch: Pair) -> int:
        return batch[1].numel()

    def data_digest(self) -> str:
        return fingerprint(self.train_data.tokens, self.validation_data.tokens)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss, perplexity and, for text, bits per byte of held-out text; synchronises."""
        nats, tokens, text_bytes = 0.0, 0, 0
        lengths = None if self.tokenizer is None else self.tokenizer.byte_lengths()
        with torch.no_grad(), in_eval_mode(model):
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

    def held_out(self) -> EvalBatches | None:
        """Return the evaluation batches; None without text, as on the meta device."""
        windows = self._validation_windows()
        if not windows:
            return None

        def loss(model: nn.Module, part: int) -> Tensor:
            first = part * self.batch_size
            batch = self.validation_data.__getitems__(windows[first : first + self.batch_size])
            on_device = batch[0].to(self.device), batch[1].to(self.device)
            return self.loss(model, on_device)

        return EvalBatches(parts=math.ceil(len(windows) / self.batch_size), headline=loss)

    def text_samples(self) -> TextSamples | None:
        """Return what draws text for the report; None if there is no text or none is wanted."""
        settings, tokenizer = self.samples, self.tokenizer
        count = min(settings.tokens, self.model.length // 2)
        if tokenizer is None or count == 0:
            if settings.prompts and self.device.type != "meta":
                raise ConfigError(
                    f"samples.prompts needs text and samples.tokens above 0, got data.text="
                    f"{SYNTHETIC} or samples.tokens={settings.tokens}. Leave samples.prompts out."
                )
            return None
        prompts = self._prompts(tokenizer, most=self.model.length - count)

        def draw(model: nn.Module) -> list[tuple[str, str]]:
            drawn = continue_all(
                model,
                prompts,
                count=count,
                seed=self.seed,
                temperature=settings.temperature,
                vocab=tokenizer.size,
            )
            return [
                (tokenizer.decode(prompt), tokenizer.decode(tokens))
                for prompt, tokens in zip(prompts, drawn, strict=True)
            ]

        rows = len(prompts) * (max(map(len, prompts)) + count)
        least = WAITING if self.device.type == "cuda" else LAUNCHING
        share = rows / (self.batch_size * self.model.length)
        return TextSamples(draw=draw, passes=count * max(least, share))

    def _prompts(self, tokenizer: Tokenizer, *, most: int) -> list[list[int]]:
        """Return the tokens of each prompt."""
        if not self.samples.prompts:
            starts = [0, len(self.validation_data) // 2][: len(self.validation_data)]
            rows, _ = self.validation_data.__getitems__(starts)
            return [[int(token) for token in row[: min(PROMPT, most)]] for row in rows]
        prompts = [tokenizer.encode(text).tolist() for text in self.samples.prompts]
        for text, tokens in zip(self.samples.prompts, prompts, strict=True):
            if len(tokens) > most:
                raise ConfigError(
                    f"samples.prompts must have at most {most} tokens each with data.length="
                    f"{self.model.length}, got {len(tokens)} in {text[:40]!r}. Write a shorter "
                    "one, or fewer samples.tokens."
                )
        return prompts

    def _validation_windows(self) -> list[int]:
        available = len(self.validation_data)
        count = min(self.eval_windows, available)
        return [number * available // count for number in range(count)]

    def _validation_batches(self) -> Iterator[Pair]:
        chosen = self._validation_windows()
        for first in range(0, len(chosen), self.batch_size):
            yield self.validation_data.__getitems__(chosen[first : first + self.batch_size])


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task of predicting the next token."""
    return build_language_model(recipe, device=device).task()


def build_language_model(recipe: Recipe, *, device: torch.device) -> LanguageModel:
    """Read the text, and build the model on `device`; on the meta device read no text."""
    data, settings = recipe.section(LmData), recipe.section(LmModel)
    vocab = _vocab(data, settings)
    _require_room(recipe, vocab=vocab, device=device)
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
    model = build_gpt(settings, vocab=vocab, length=data.length, seed=recipe.seed, device=device)
    if every := recipe.section(LmRehearsal).swell:
        if settings.bias or settings.mlp != "gelu":
            raise ConfigError(
                f"rehearse.swell={every} needs a layer without a bias. Write model.bias=false, "
                "model.mlp=gelu."
            )
        let_swell(model, every=every)
    return LanguageModel(
        model=model,
        train_data=Windows(train, data.length),
        validation_data=Windows(validation, data.length),
        tokenizer=tokenizer,
        eval_windows=data.eval_windows,
        batch_size=recipe.batch_size,
        device=device,
        samples=recipe.section(LmSamples),
        seed=recipe.seed,
    )


def _require_room(recipe: Recipe, *, vocab: int, device: torch.device) -> None:
    """Raise for batches whose activations cannot fit on the device."""
    if device.type == "meta":
        return
    data, shape = recipe.section(LmData), recipe.section(LmModel)
    rows = recipe.batch_size * data.length
    # What linear layers read, for their weights' gradients: a byte a number in fp8. A CPU keeps
    # fp32, and all logits with their gradients.
    stored = rows * shape.layers * (3 * shape.width + shape.hidden_width)
    if device.type == "cpu":
        stored = 4 * (stored + 2 * rows * vocab)
    hardware = detect_hardware(str(device))
    if hardware.memory_bytes is not None and stored > hardware.memory_bytes:
        raise UnsupportedError(
            f"A micro-batch of batch_size={recipe.batch_size} samples of data.length={data.length} "
            f"needs at least {stored / 2**30:,.0f} GiB of activations, but {hardware.name} "
            f"({hardware.device}) has {hardware.memory_bytes / 2**30:,.0f} GiB. Write a smaller "
            "batch_size and more gradient_accumulation_steps, or a smaller data.length or model."
        )


def _vocab(data: LmData, settings: LmModel) -> int:
    """Return the vocabulary size; raise if the tokenizer has more tokens."""
    if data.synthetic:
        return settings.vocab or ByteTokenizer.size
    fewest = ByteTokenizer.size
    if data.tokenizer not in ("bytes", "bpe"):
        _require_bpe(data)
        from narrowcast.workloads.lm.bpe import read_vocabulary

        fewest = len(read_vocabulary(Path(data.tokenizer)))
    if settings.vocab is None:
        return BPE_TOKENS if data.tokenizer == "bpe" else fewest
    if settings.vocab < fewest:
        raise ConfigError(
            f"model.vocab must be at least {fewest} for data.tokenizer={data.tokenizer}, got "
            f"{settings.vocab}. Write model.vocab={fewest}, or leave it out."
        )
    return settings.vocab


def _tokenised(data: LmData, *, vocab: int) -> tuple[Tokens, Tokens, Tokenizer]:
    """Return the tokens to train on, those to validate on, and the tokenizer."""
    text = split_text(read_text(data.sources), validation_share=data.validation_share)
    tokenizer: Tokenizer = ByteTokenizer()
    if data.tokenizer != "bytes":
        _require_bpe(data)
        from narrowcast.workloads.lm.bpe import BpeTokenizer

        # From the training text alone: merges learnt on the rest would tell about it.
        tokenizer = (
            BpeTokenizer.trained(text.train, size=vocab)
            if data.tokenizer == "bpe"
            else BpeTokenizer.loaded(Path(data.tokenizer))
        )
    return tokenizer.encode(text.train), tokenizer.encode(text.validation), tokenizer


def _require_bpe(data: LmData) -> None:
    require_modules(["tokenizers"], of=f"data.tokenizer={data.tokenizer}", install=WORKLOAD.install)


def _require_windows(train: int, validation: int, *, length: int) -> None:
    shorter = min(train, validation)
    if shorter > length:
        return
    smaller = f", or write data.length={shorter - 1}" if shorter > 1 else ""
    raise ConfigError(
        f"data.length={length} is too long: the text has {train} training and {validation} "
        f"validation tokens, and a sample needs {length + 1}. Give more text in data.text{smaller}."
    )
