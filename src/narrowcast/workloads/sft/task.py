"""The task of fine-tuning: a language model, conversations, and the loss on what it should say."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
from narrowcast.hardware import probe
from narrowcast.numerics import plain_format
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.task import Task
from narrowcast.workloads.sft.data.packing import IGNORED, Packs
from narrowcast.workloads.sft.data.prepare import PreparedData, prepare_data
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.tokenised import TokenRows
from narrowcast.workloads.sft.models.loading import load_config, load_model, load_tokenizer
from narrowcast.workloads.sft.models.lora import add_adapters
from narrowcast.workloads.sft.models.saving import (
    ADAPTER,
    MERGED,
    MODEL,
    save_adapter,
    save_merged,
    save_model,
    saved_dtype,
)
from narrowcast.workloads.sft.settings import LoraSection, SftModel

Batch: TypeAlias = dict[str, Tensor]

LOSS, PERPLEXITY = Metric(name="loss"), Metric(name="perplexity")
EVAL_PACKS = 64
"""Rows of training data that are judged where there is nothing to validate on."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuning:
    """A language model, the conversations it learns, and what is left of it at the end."""

    recipe: Recipe
    model: Any
    tokenizer: Any
    data: PreparedData
    device: torch.device

    def task(self) -> Task:
        """Return what the engine trains."""
        return Task(
            model=self.model,
            train_data=self.data.train,
            loss=self.loss,
            evaluate=self.evaluate,
            items=self.items,
            info=TaskInfo(unit="token", metrics=(LOSS, PERPLEXITY)),
            gemm_rows=self.recipe.batch_size * self._settings.max_seq_length,
            data_digest=self.data.digest,
            write_results=self.write_results,
        )

    @property
    def _settings(self) -> SftData:
        return self.recipe.section(SftData)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the tokens to learn, in nats."""
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss

    def items(self, batch: Batch) -> int:
        """Count the tokens of the conversations of a batch, without what fills its rows up."""
        tokens, learnt = batch["input_ids"], batch["labels"] != IGNORED
        said = (tokens != self.data.train.padding) | learnt
        places = torch.arange(1, tokens.shape[1] + 1)
        return int((said * places).amax(1).sum())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return nats a token of held-out responses, and the perplexity; waits for the device."""
        nats, tokens = torch.zeros((), dtype=torch.float64), 0
        for batch in self._held_out():
            learnt = int((batch["labels"][:, 1:] != IGNORED).sum())
            on_device = {name: tensor.to(self.device) for name, tensor in batch.items()}
            nats += self.loss(model, on_device).cpu().double() * learnt
            tokens += learnt
        loss = nats / tokens
        return {"loss": loss.item(), "perplexity": loss.exp().item()}

    def _held_out(self) -> Iterator[Batch]:
        held, size = self.data.validation, self.recipe.batch_size
        count = len(self.data.train) if held is None else len(held)
        if held is None:
            held, count = self.data.train, min(count, EVAL_PACKS)
        for first in range(0, count, size):
            yield held.__getitems__(list(range(first, min(first + size, count))))

    @cached_property
    def _saved_dtype(self) -> torch.dtype:
        settings = self.recipe.section(SftModel)
        config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
        return saved_dtype(settings.save_dtype, config)

    def write_results(self, folder: Path, prepared: Prepared) -> None:
        """Write folders that transformers and peft load."""
        settings, lora = self.recipe.section(SftModel), self.recipe.section(LoraSection)
        weights, dtype = prepared.full_weights(), self._saved_dtype
        if settings.tune == "full":
            save_model(
                self.model.config,
                weights,
                folder / MODEL,
                tokenizer=self.tokenizer,
                dtype=dtype,
                generation=self.model.generation_config,
                trust_remote_code=settings.trust_remote_code,
            )
            return
        save_adapter(self.model, weights, folder / ADAPTER, tokenizer=self.tokenizer)
        if lora.merge_adapter_with_base:
            base = _base(self.recipe, device=torch.device("cpu")).float()
            save_merged(
                base, folder / ADAPTER, folder / MERGED, tokenizer=self.tokenizer, dtype=dtype
            )


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task of fine-tuning a language model."""
    return build_fine_tuning(recipe, device=device).task()


def build_fine_tuning(recipe: Recipe, *, device: torch.device) -> FineTuning:
    """Load the model to `device` and read the data; on the meta device read shapes only."""
    settings, data = recipe.section(SftModel), recipe.section(SftData)
    tokenizer = load_tokenizer(settings.path, trust_remote_code=settings.trust_remote_code)
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    _refuse_tokens(settings.path, tokenizer, config)
    if device.type == "meta":
        prepared = _nothing()
    else:
        prepared = prepare_data(data, tokenizer, seed=recipe.seed)
        _refuse_long_rows(prepared, config)
    model = _base(recipe, device=device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.tune == "lora":
        model = add_adapters(model, recipe.section(LoraSection), seed=recipe.seed)
    return FineTuning(recipe=recipe, model=model, tokenizer=tokenizer, data=prepared, device=device)


def _base(recipe: Recipe, *, device: torch.device) -> Any:
    """Return the model as it is before any training, in the format its weights begin in."""
    settings = recipe.section(SftModel)
    attention = settings.attn_implementation
    return load_model(
        settings.path,
        dtype=_base_dtype(recipe, device=device),
        device=device,
        trust_remote_code=settings.trust_remote_code,
        seed=recipe.seed,
        **({} if attention == "auto" else {"attn_implementation": attention}),
    )


def _base_dtype(recipe: Recipe, *, device: torch.device) -> torch.dtype | None:
    """Return what weights begin in: fp32 if trained; frozen, as asked or as the files have them."""
    settings = recipe.section(SftModel)
    if settings.tune == "full":
        return torch.float32
    if settings.base != "auto":
        return plain_format(settings.base).dtype
    there = torch.device(recipe.device) if recipe.device != "auto" else device
    emulates = (
        probe(str(there)).support("bf16").how == "emulated" if there.type != "meta" else False
    )
    return torch.float32 if emulates else None


def _refuse_tokens(name: str, tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for."""
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise RecipeError(
            f"model.path={name}: its tokenizer has {len(tokenizer):,} tokens and the model knows "
            f"{text.vocab_size:,}; give the tokenizer that belongs to the model, or resize its "
            "embeddings (resize_token_embeddings of transformers) and save it"
        )


def _refuse_long_rows(data: PreparedData, config: Any) -> None:
    """Refuse conversations that are longer than the model was made for."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    parts = [part for part in (data.train, data.validation) if part is not None]
    longest = max(int(part.rows.lengths.max(initial=0)) for part in parts)
    if context is not None and longest > context:
        raise RecipeError(
            f"a conversation has {longest:,} tokens, and the model was made for {context:,}; write "
            f"data.max_seq_length={context}, and data.too_long says what becomes of longer ones"
        )


def _nothing() -> PreparedData:
    """Return data without rows, for a plan."""
    from narrowcast.workloads.sft.data.report import DataReport

    rows = TokenRows.joined([])
    packs = Packs(rows=rows, packs=(), padding=0, width=None)
    report = DataReport(formats=(), template="", rows_read=0)
    return PreparedData(train=packs, validation=None, report=report)
