"""What a recipe that fine-tunes names, made: tokenizer, data, model, adapters, judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.precision.plan.folding import decibel_range
from narrowcast.workloads.sft.calling import Calling
from narrowcast.workloads.sft.data.packing import Packs
from narrowcast.workloads.sft.data.prepare import PreparedData, prepare_data
from narrowcast.workloads.sft.data.report import DataReport
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import Template, select_template
from narrowcast.workloads.sft.data.tokenised import TokenRows
from narrowcast.workloads.sft.ica.applied import Applied, apply_networks, sampled
from narrowcast.workloads.sft.ica.networks import Provenance
from narrowcast.workloads.sft.ica.settings import IcaSection
from narrowcast.workloads.sft.judge.generation import model_ends, set_stop_tokens
from narrowcast.workloads.sft.judge.judging import Judge
from narrowcast.workloads.sft.judge.prompts import stop_tokens
from narrowcast.workloads.sft.judge.settings import EvalTasksSection
from narrowcast.workloads.sft.models.base import Built, build_model
from narrowcast.workloads.sft.models.loading import load_config, load_tokenizer
from narrowcast.workloads.sft.models.lora import adapted
from narrowcast.workloads.sft.models.results import ADAPTER, weights_folder
from narrowcast.workloads.sft.settings import LoraSection, SftModel


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """A model, what it learns, and what judges it."""

    model: Any
    tokenizer: Any
    data: PreparedData
    judge: Judge | None
    """None where no data was read."""
    calling: Calling
    vocabulary: int
    networks: Applied | None
    """None where the recipe asks for none."""
    notes: tuple[str, ...]


def build_parts(recipe: Recipe, *, device: torch.device) -> Parts:
    """Load the model to `device` and read the data; on the meta device read shapes only."""
    settings, data = recipe.section(SftModel), recipe.section(SftData)
    remote = settings.trust_remote_code
    tokenizer = load_tokenizer(
        settings.path, trust_remote_code=remote, eos_token=settings.eos_token
    )
    text_config = load_config(settings.path, trust_remote_code=remote).get_text_config()
    _check_tokens(settings.path, tokenizer, text_config)
    context = getattr(text_config, "max_position_embeddings", None)
    rows = _NOTHING if device.type == "meta" else prepare_data(data, tokenizer, seed=recipe.seed)
    _check_row_lengths(rows, context)
    built = build_model(recipe, device=device)
    model, vocabulary = built.model, text_config.vocab_size
    calling = Calling(packing=data.packing, bounded=built.bounded, context=context)
    if device.type != "meta":
        calling.check_causal(model, vocabulary=vocabulary)
    networks = _networks(recipe, model, rows)
    judge, lines = None, _trained(built, recipe)
    if device.type != "meta":
        template = _template(data, tokenizer)
        lines += (*rows.report.lines(), *_stop_at_ends(model, template, recipe))
        judge = _judge(recipe, template, model, rows)
    return Parts(
        model=model,
        tokenizer=tokenizer,
        data=rows,
        judge=judge,
        calling=calling,
        vocabulary=vocabulary,
        networks=networks,
        notes=(*lines, *(networks.lines() if networks is not None else ())),
    )


def _template(data: SftData, tokenizer: Any) -> Template:
    return select_template(
        data.template_format,
        tokenizer,
        instruction_template=data.instruction_template,
        loss_on=data.loss_on,
    )


def _stop_at_ends(model: nn.Module, template: Template, recipe: Recipe) -> tuple[str, ...]:
    """Let a model that is saved whole stop at what it learns; say where an adapter will not.

    An adapter's folder has no generation settings: transformers and peft use those of its base.
    """
    ends = stop_tokens(template)
    if weights_folder(recipe) != ADAPTER:
        set_stop_tokens(model, ends)
    elif not model_ends(model).intersection(ends):
        names = template.tokenizer.convert_ids_to_tokens(list(ends))
        return (
            f"the base model's generation settings do not stop at {' or '.join(names)}: pass "
            f"eos_token_id={ends[0]} to generate(), or set lora.merge_adapter_with_base=true",
        )
    return ()


def _judge(recipe: Recipe, template: Template, model: nn.Module, rows: PreparedData) -> Judge:
    return Judge(
        recipe.section(EvalTasksSection),
        template,
        model=model,
        steps=recipe.for_samples(len(rows.train)).steps,
        eval_every=recipe.eval.every,
        shown=None if rows.validation is None else rows.validation.rows,
    )


def _networks(recipe: Recipe, model: nn.Module, rows: PreparedData) -> Applied | None:
    section, named = recipe.section(IcaSection), recipe.section(SftData).sources
    listened = sampled(rows.train, section.samples, seed=recipe.seed) if section.wanted else []
    provenance = Provenance(model=recipe.section(SftModel).path, data=", ".join(named))
    return apply_networks(model, section, listened, seed=recipe.seed, provenance=provenance)


def _trained(built: Built, recipe: Recipe) -> tuple[str, ...]:
    """Say how much of a model is trained, where it is not all of it."""
    settings, rank = recipe.section(SftModel), recipe.section(LoraSection).lora_r
    if settings.tune == "full":
        return ()
    model = built.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    experts = [p for p in model.parameters() if p.dim() == 3 and not p.requires_grad]
    decibels = decibel_range(list(built.quantized.values()))
    quantized = f", {len(built.quantized)} layers in e4m3 at {decibels}"
    return (
        f"{trained:,} parameters are trained, in adapters of rank {rank} on "
        f"{', '.join(adapted(model))}; {frozen:,} are frozen{quantized if built.quantized else ''}",
        *_of_experts(experts),
    )


def _of_experts(weights: Sequence[Tensor]) -> tuple[str, ...]:
    """Say what is left of a mixture of experts, whose weights are in no linear layer."""
    if not weights:
        return ()
    count, dtype = sum(p.numel() for p in weights), str(weights[0].dtype).removeprefix("torch.")
    return (f"{count:,} parameters of experts have no adapters and stay in {dtype}",)


def _check_tokens(name: str, tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"The tokenizer of model.path={name} has {len(tokenizer):,} tokens, but the model has "
            f"{config.vocab_size:,}. Use the tokenizer of this model, or resize the embeddings "
            "(resize_token_embeddings of transformers) and save the model."
        )


def _check_row_lengths(data: PreparedData, context: int | None) -> None:
    """Refuse conversations that are longer than the model was made for."""
    parts = [part for part in (data.train, data.validation) if part is not None]
    longest = max(int(part.rows.lengths.max(initial=0)) for part in parts)
    if context is not None and longest > context:
        raise ConfigError(
            f"Conversations must fit into the model's {context:,} tokens, got one with "
            f"{longest:,}. Write data.max_seq_length={context}; data.too_long sets what happens to "
            "longer ones."
        )


_NOTHING = PreparedData(
    train=Packs(rows=TokenRows.joined([]), packs=(), padding=0, width=None),
    validation=None,
    report=DataReport(formats=(), template="", rows_read=0),
)
"""The data of a plan."""
