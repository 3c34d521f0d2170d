"""All of it: from what a recipe names to batches by number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.errors import ConfigError
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.sft.data import cache
from narrowcast.workloads.sft.data.formats import Conversations
from narrowcast.workloads.sft.data.judging import filter_rows
from narrowcast.workloads.sft.data.packing import Packs, alone, packed
from narrowcast.workloads.sft.data.report import DataReport, Tally
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import Source, Sources, find_sources
from narrowcast.workloads.sft.data.splitting import rows_in_both, split_rows
from narrowcast.workloads.sft.data.templates import Template, select_template
from narrowcast.workloads.sft.data.tokenised import Encoder, TokenRows, padding_token


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedData:
    """Batches to train on and to validate on, and what is told of them."""

    train: Packs
    validation: Packs | None
    """None where the recipe asks for no validation."""
    report: DataReport

    def digest(self) -> str:
        """Return a text that is another one for other tokens or marks, of either part."""
        parts = [self.train, *([self.validation] if self.validation is not None else [])]
        rows = [part.rows for part in parts]
        return fingerprint(*(array for r in rows for array in (r.tokens, r.learnt, r.offsets)))


def prepare_data(data: SftData, tokenizer: Any, *, seed: int) -> PreparedData:
    """Read, check, write, cut, split and pack what a recipe names; everything is told."""
    template = select_template(
        data.template_format,
        tokenizer,
        instruction_template=data.instruction_template,
        loss_on=data.loss_on,
    )
    sources = find_sources(data)
    stored, cached, note = _cached_rows(sources, template, data)
    train, validation = stored.train, stored.validation
    if validation is None:
        train, validation = split_rows(train, data.validation_split, seed=seed)
    padding = padding_token(tokenizer)
    training = _packs(train, data, padding)
    report = DataReport(
        **{**stored.about, "formats": tuple(stored.about["formats"])},
        template=template.name,
        train_rows=len(train),
        validation_rows=0 if validation is None else len(validation),
        repeated_rows=0 if stored.validation is None else rows_in_both(train, stored.validation),
        tokens=len(train.tokens),
        learnt_tokens=int(train.learnt.sum()),
        packs=len(training),
        efficiency=training.efficiency,
        cached=cached,
        notes=(*sources.notes, *([note] if note else [])),
    )
    held = None if validation is None else _packs(validation, data, padding)
    return PreparedData(train=training, validation=held, report=report)


def _packs(rows: TokenRows, data: SftData, padding: int) -> Packs:
    if not data.packing:
        return Packs(rows=rows, packs=alone(len(rows)), padding=padding, width=None)
    packs = packed(rows.lengths.tolist(), data.max_seq_length)
    return Packs(rows=rows, packs=packs, padding=padding, width=data.max_seq_length)


def _cached_rows(
    sources: Sources, template: Template, data: SftData
) -> tuple[cache.CachedRows, bool, str]:
    """Return the tokens, from the cache where they are kept there; and what went wrong with it."""
    if not data.pretokenize:
        return _tokenised(sources, template, data), False, ""
    folder, key = cache.token_cache_folder(data), cache.cache_key(sources, template, data)
    result, note = cache.load(folder, key)
    if result is not None:
        return result, True, ""
    made = _tokenised(sources, template, data)
    cache.save(folder, key, made)
    return made, False, note


def _tokenised(sources: Sources, template: Template, data: SftData) -> cache.CachedRows:
    tally, encoder = Tally(), Encoder.of(template, data)
    train = _rows(sources.train, encoder, tally, key="path")
    held = sources.validation
    validation = _rows(held, encoder, tally, key="validation_path") if held else None
    return cache.CachedRows(train, validation, tally.to_json())


def _rows(sources: Sequence[Source], encoder: Encoder, tally: Tally, *, key: str) -> TokenRows:
    data, matched = encoder.data, []
    for source in sources:
        read = Conversations(source.rows(), data.format, data.columns)
        matched += list(encoder.rows(filter_rows(read, data, tally), tally))
        tally.rows_read += read.count
        if read.format is not None:
            tally.formats.add(read.format.name)
    if not matched:
        why = ", ".join(f"{count}: {reason}" for reason, count in tally.dropped.items())
        raise ConfigError(
            f"data.{key}: no rows are left ({why}). Change the settings that drop rows."
        )
    return TokenRows.joined(matched)
