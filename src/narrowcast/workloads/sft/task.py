"""The fine-tuning task: build the model and data of a recipe, and train on responses."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.precision.plan.folding import decibel_range
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import TaskInfo
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import EvalBatches, Task
from narrowcast.workloads.sft.attention import Batch, Calling
from narrowcast.workloads.sft.data.prepare import NO_DATA, PreparedData, prepare_data
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.ica.applied import Applied, sampled
from narrowcast.workloads.sft.ica.networks import Provenance
from narrowcast.workloads.sft.ica.settings import IcaSection
from narrowcast.workloads.sft.judge.generation import model_ends, set_stop_tokens
from narrowcast.workloads.sft.judge.judging import Judge
from narrowcast.workloads.sft.judge.prompts import stop_tokens
from narrowcast.workloads.sft.judge.settings import EvalTasksSection
from narrowcast.workloads.sft.models.base import Built, adapted, build_model
from narrowcast.workloads.sft.models.loading import load_config, load_tokenizer
from narrowcast.workloads.sft.models.saving import ADAPTER, weights_folder, write_models
from narrowcast.workloads.sft.objectives import (
    ROWS_JUDGED,
    Objective,
    build_objective,
    has_preferences,
)
from narrowcast.workloads.sft.settings import LoraSection, SftModel

LOGIT_BYTES = 2**30
"""Of fp32 logits at once in an evaluation."""


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the fine-tuning task; on the meta device only shapes are read."""
    settings, data = recipe.section(SftModel), recipe.section(SftData)
    remote = settings.trust_remote_code
    tokenizer = load_tokenizer(
        settings.path, trust_remote_code=remote, eos_token=settings.eos_token
    )
    text_config = load_config(settings.path, trust_remote_code=remote).get_text_config()
    if len(tokenizer) > text_config.vocab_size:
        raise ConfigError(
            f"The tokenizer of model.path={settings.path} has {len(tokenizer):,} tokens, but the "
            f"model has {text_config.vocab_size:,}. Use the tokenizer of this model, or resize the "
            "embeddings (resize_token_embeddings of transformers) and save the model."
        )
    context = getattr(text_config, "max_position_embeddings", None)
    pairs = has_preferences(recipe)
    rows = NO_DATA
    if device.type != "meta":
        rows = prepare_data(data, tokenizer, seed=recipe.seed, pairs=pairs)
    _check_row_lengths(rows, context)
    built = build_model(recipe, device=device)
    calling = Calling(packing=data.packing, bounded=built.bounded, context=context)
    if device.type != "meta":
        calling.check_causal(built.model, vocabulary=text_config.vocab_size)
    networks = _networks(recipe, built.model, rows)
    judge, notes = None, _trained(built, recipe)
    objective, lines = build_objective(recipe, built.model, calling, rows, device=device)
    notes += lines
    if rows.template is not None:
        notes += [*rows.report.lines(), *_stop_at_ends(built.model, rows.template, recipe)]
        judge = Judge(
            recipe.section(EvalTasksSection),
            rows.template,
            model=built.model,
            steps=recipe.for_samples(len(rows.train)).steps,
            eval_every=recipe.eval.every,
            shown=rows.shown,
        )
    fine_tuning = FineTuning(
        recipe=recipe,
        tokenizer=tokenizer,
        data=rows,
        judge=judge,
        objective=objective,
        vocabulary=text_config.vocab_size,
        networks=networks,
        device=device,
    )
    notes += networks.lines() if networks is not None else []
    return fine_tuning.task(built.model, notes)


def _stop_at_ends(model: nn.Module, template: Template, recipe: Recipe) -> list[str]:
    """Add stop tokens to a full model; return a note if an adapter's base will not stop."""
    ends = stop_tokens(template)
    if weights_folder(recipe) != ADAPTER:
        set_stop_tokens(model, ends)
    elif not model_ends(model).intersection(ends):
        names = template.tokenizer.convert_ids_to_tokens(list(ends))
        return [
            f"the base model's generation settings do not stop at {' or '.join(names)}: pass "
            f"eos_token_id={ends[0]} to generate(), or set lora.merge_adapter_with_base=true"
        ]
    return []


def _networks(recipe: Recipe, model: nn.Module, rows: PreparedData) -> Applied | None:
    section, named = recipe.section(IcaSection), recipe.section(SftData).sources
    if not section.wanted:
        return None
    batches = sampled(rows.train, section.samples, seed=recipe.seed)
    provenance = Provenance(model=recipe.section(SftModel).path, data=", ".join(named))
    return Applied(model, section, batches, seed=recipe.seed, provenance=provenance)


def _trained(built: Built, recipe: Recipe) -> list[str]:
    """Return notes on the number of trained parameters, unless all are."""
    if recipe.section(SftModel).tune == "full":
        return []
    trained = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    frozen = [p for p in built.model.parameters() if not p.requires_grad]
    notes = [
        f"{trained:,} parameters are trained, in adapters of rank "
        f"{recipe.section(LoraSection).lora_r} on {', '.join(adapted(built.model))}; "
        f"{sum(p.numel() for p in frozen):,} are frozen"
    ]
    if built.quantized:
        decibels = decibel_range(list(built.quantized.values()))
        notes[0] += f", {len(built.quantized)} layers in e4m3 at {decibels}"
    # Weights of experts are in no linear layer.
    if experts := [p for p in frozen if p.dim() == 3]:
        count = sum(p.numel() for p in experts)
        dtype = str(experts[0].dtype).removeprefix("torch.")
        notes.append(f"{count:,} parameters of experts have no adapters and stay in {dtype}")
    return notes


def _check_row_lengths(data: PreparedData, context: int | None) -> None:
    """Raise if conversations exceed the context length."""
    parts = [part for part in (data.train, data.validation) if part is not None]
    longest = max(int(part.rows.lengths.max(initial=0)) for part in parts)
    if context is not None and longest > context:
        raise ConfigError(
            f"Conversations must fit into the model's {context:,} tokens, got one with "
            f"{longest:,}. Write data.max_seq_length={context}; data.too_long sets what happens to "
            "longer ones."
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuning:
    """A language model and its conversations."""

    recipe: Recipe
    tokenizer: Any
    data: PreparedData
    judge: Judge | None
    """None on the meta device."""
    objective: Objective
    vocabulary: int
    networks: Applied | None
    device: torch.device

    def task(self, model: nn.Module, notes: Sequence[str]) -> Task:
        """Return the task for the engine."""
        judge, networks, objective = self.judge, self.networks, self.objective
        judged = () if judge is None else judge.info_metrics()
        # The judge first: it evaluates the model without masks, as it is saved.
        hooks = [*(() if judge is None else judge.hooks())]
        hooks += [] if networks is None else [networks.hook]
        hooks += objective.hooks()
        length = self.recipe.section(SftData).max_seq_length
        rows_each = 2 if has_preferences(self.recipe) else 1
        return Task(
            model=model,
            train_data=self.data.train,
            loss=objective.loss,
            evaluate=self.evaluate,
            items=objective.items,
            info=TaskInfo(
                unit="token",
                metrics=(*objective.metrics, *judged),
                loss_parts=objective.loss_parts,
                notes=tuple(notes),
            ),
            gemm_rows=rows_each * self.recipe.batch_size * length,
            held_out=self.held_out(),
            data_digest=self.digest,
            prepare_microbatches=objective.weigh,
            loss_terms=objective.terms,
            hooks=tuple(hooks),
            write_results=self.write_results,
            weights_path=weights_folder(self.recipe),
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss, perplexity and evaluation tasks; synchronises."""
        measured, judge = self._measured(model), self.judge
        return measured if judge is None else measured | judge.metrics(model)

    def _measured(self, model: nn.Module) -> dict[str, float]:
        batches = map(self._eval_batch, range(len(self._parts())))
        return self.objective.measured(model, batches)

    def digest(self) -> str:
        """Return a fingerprint of training and evaluation data."""
        judge, own = self.judge, self.data.digest()
        return own if judge is None else f"{own} {judge.digest()}"

    def write_results(self, folder: Path, prepared: Prepared) -> None:
        """Write model folders, networks, metrics and samples."""
        write_models(folder, prepared, self.recipe, tokenizer=self.tokenizer)
        model, judge, networks = prepared.model, self.judge, self.networks
        with torch.no_grad(), in_eval_mode(model), prepared.autocast():
            if networks is not None:
                networks.write(folder, lambda: self._measured(model))
            if judge is not None:
                with contextlib.nullcontext() if networks is None else networks.lifted():
                    judge.after(model, folder)

    def held_out(self) -> EvalBatches | None:
        """Return the evaluation batches, or None on the meta device."""
        parts = len(self._parts())

        def loss(model: nn.Module, part: int) -> Tensor:
            return self.objective.total(model, self._eval_batch(part))

        return EvalBatches(parts=parts, headline=loss) if parts else None

    def _parts(self) -> list[range]:
        """Return the rows of each evaluation batch, whose logits fit into LOGIT_BYTES."""
        length = self.recipe.section(SftData).max_seq_length
        at_once = max(1, LOGIT_BYTES // (4 * length * self.vocabulary))
        size = min(self.recipe.batch_size, at_once)
        held = self.data.validation
        count = min(len(self.data.train), ROWS_JUDGED) if held is None else len(held)
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def _eval_batch(self, part: int) -> Batch:
        judged = self.data.train if self.data.validation is None else self.data.validation
        batch = judged.__getitems__(list(self._parts()[part]))
        return {name: tensor.to(self.device) for name, tensor in batch.items()}
