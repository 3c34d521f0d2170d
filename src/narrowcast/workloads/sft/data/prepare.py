"""Prepare the data of a recipe: read, filter, tokenise, split and pack."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.errors import ConfigError
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.sft.data import cache
from narrowcast.workloads.sft.data.formats import Conversations
from narrowcast.workloads.sft.data.packing import Packs, alone, packed
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import Source, Sources, find_sources
from narrowcast.workloads.sft.data.templates import Template, select_template
from narrowcast.workloads.sft.data.tokenised import (
    Encoder,
    Tally,
    TokenRows,
    filter_rows,
    padding_token,
)


def split_rows(rows: TokenRows, share: float, *, seed: int) -> tuple[TokenRows, TokenRows | None]:
    """Return training and validation rows, split by seed and content: equal rows stay together."""
    if share == 0:
        return rows, None
    drawn = _digests(rows, seed)
    order = sorted(set(drawn))
    if len(order) < 2:
        raise ConfigError(
            f"data.validation_split={share} needs at least two different rows. Write "
            "data.validation_split=0 to train without validation."
        )
    wanted = min(max(round(share * len(order)), 1), len(order) - 1)
    held = set(order[:wanted])
    train = [number for number, digest in enumerate(drawn) if digest not in held]
    return rows.taken(train), rows.taken(n for n, digest in enumerate(drawn) if digest in held)


def rows_in_both(train: TokenRows, validation: TokenRows) -> int:
    """Count the validation rows that are also training rows."""
    known = set(_digests(train, 0))
    return sum(digest in known for digest in _digests(validation, 0))


def _digests(rows: TokenRows, seed: int) -> list[bytes]:
    key = seed.to_bytes(8, "little")
    return [
        hashlib.blake2b(rows.row(number)[0].tobytes(), key=key, digest_size=16).digest()
        for number in range(len(rows))
    ]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Summary of the prepared data."""

    formats: tuple[str, ...]
    template: str
    rows_read: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped rows by reason."""
    cut: int = 0
    with_signs: int = 0
    """Rows that contain the text of a special token."""
    train_rows: int = 0
    validation_rows: int = 0
    repeated_rows: int = 0
    """Validation rows that are also training rows."""
    tokens: int = 0
    learnt_tokens: int = 0
    packs: int = 0
    efficiency: float = 1.0
    cached: bool = False
    notes: tuple[str, ...] = ()

    @property
    def response_share(self) -> float:
        return self.learnt_tokens / max(self.tokens, 1)

    def lines(self) -> list[str]:
        formats = ", ".join(self.formats)
        said = [
            f"{self.rows_read:,} rows read as {formats}, rendered with template {self.template}: "
            f"{self.train_rows:,} training rows, {self.validation_rows:,} validation rows",
            f"{self.tokens:,} training tokens, loss on {self.response_share:.1%} of them",
        ]
        if self.packs < self.train_rows:
            said.append(f"packed into {self.packs:,} rows, {self.efficiency:.1%} full")
        said += [f"{count:,} rows dropped: {why}" for why, count in self.dropped.items()]
        if self.cut:
            said.append(
                f"{self.cut:,} rows truncated at max_seq_length, which cuts their responses"
            )
        if self.with_signs:
            said.append(
                f"{self.with_signs:,} rows contain the text of special tokens, which the tokenizer "
                "reads as special tokens"
            )
        if self.repeated_rows:
            said.append(f"{self.repeated_rows:,} validation rows are also training rows")
        return [*said, *self.notes]


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedData:
    """Training and validation batches, and a report."""

    train: Packs
    validation: Packs | None
    report: DataReport
    template: Template | None = None
    """None for a plan, which reads no data."""

    def digest(self) -> str:
        """Return a fingerprint of all tokens and loss masks."""
        parts = [self.train, *([self.validation] if self.validation is not None else [])]
        return fingerprint(*(array for part in parts for array in part.rows.arrays().values()))


def prepare_data(data: SftData, tokenizer: Any, *, seed: int) -> PreparedData:
    """Read, filter, tokenise, split and pack the data of a recipe."""
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
    return PreparedData(train=training, validation=held, report=report, template=template)


def _packs(rows: TokenRows, data: SftData, padding: int) -> Packs:
    if not data.packing:
        return Packs(rows=rows, packs=alone(len(rows)), padding=padding, width=None)
    packs = packed(rows.lengths.tolist(), data.max_seq_length)
    return Packs(rows=rows, packs=packs, padding=padding, width=data.max_seq_length)


def _cached_rows(
    sources: Sources, template: Template, data: SftData
) -> tuple[cache.CachedRows, bool, str]:
    """Return the tokens, whether they were cached, and a note on a damaged cache."""
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
