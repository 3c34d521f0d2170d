"""Prepare the data of a recipe: read, filter, tokenise (or load from a cache), split and pack."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import ConfigError
from narrowcast.hardware.trial import cache_folder
from narrowcast.plain_files import expand_path, open_plain, read_plain
from narrowcast.runs.writing import explain_write_error, written_atomically
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.sft.data.formats import Conversations
from narrowcast.workloads.sft.data.packing import Packs, alone, packed
from narrowcast.workloads.sft.data.preferences import PairedRows, Pairs, pair_rows
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import Row, Source, Sources, find_sources
from narrowcast.workloads.sft.data.templates import Template, select_template
from narrowcast.workloads.sft.data.tokenised import (
    Encoder,
    Tally,
    TokenRows,
    filter_rows,
    padding_token,
)

VERSION = 3
"""Of the file and the tokenisation; increase it if the same rows give other tokens."""
MATTERS = (
    "format", "columns", "empty_response", "response_max_length", "instruction_max_length",
    "max_seq_length", "too_long",
)  # fmt: skip
"""Settings that affect tokens, besides those of the template."""
PIECE = 2**20


class CachedRows(NamedTuple):
    """Content of a cache file: training and validation rows, and the tally."""

    train: TokenRows
    validation: TokenRows | None
    about: dict[str, Any]


def token_cache_folder(data: SftData) -> Path:
    """Return the cache folder, creating it if necessary."""
    named = data.pretokenize_cache_dir
    folder = cache_folder() / "sft" if named is None else expand_path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.pretokenize_cache_dir={folder} cannot be created: {explain_write_error(error)}. "
            "Write another folder, or data.pretokenize=false."
        ) from error
    return folder


def cache_key(sources: Sources, template: Template, data: SftData, *, pairs: bool = False) -> str:
    """Return a SHA-256 of everything the tokens depend on."""
    whole = hashlib.sha256()
    settings = data.model_dump(include=set(MATTERS))
    tokenizer = template.tokenizer
    for part in (
        f"narrowcast sft tokens {VERSION}",
        json.dumps(settings, sort_keys=True),
        template.identity,
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        *(["pairs"] if pairs else []),
        *(_content(source) for source in sources.train),
        "validation",
        *(_content(source) for source in sources.validation),
    ):
        whole.update(f"{len(part)} ".encode())
        whole.update(part.encode())
    return whole.hexdigest()


def save_tokens(folder: Path, key: str, stored: CachedRows) -> None:
    """Write tokens atomically."""
    from safetensors.numpy import save_file

    parts = {"train": stored.train, "validation": stored.validation}
    arrays = {
        f"{name}.{field}": array
        for name, rows in parts.items()
        if rows is not None
        for field, array in rows.arrays().items()
    }
    arrays["about"] = _as_array(stored.about)
    arrays["digest"] = _as_array(_digest(arrays))
    hint = "name another data.pretokenize_cache_dir, or write data.pretokenize=false"
    with written_atomically(_path(folder, key), hint=hint) as extra:
        save_file(arrays, extra)


def load_tokens(folder: Path, key: str) -> tuple[CachedRows | None, str]:
    """Return the cached tokens, if any, and a note if they cannot be used."""
    path = _path(folder, key)
    try:
        return _checked(read_plain(path)), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return (
            None,
            f"cached tokens in {path} cannot be read ({error.strerror}) and are computed again",
        )
    except _DamagedError as error:
        return None, f"cached tokens in {path} are damaged ({error}) and are computed again"


class _DamagedError(Exception):
    """The file is damaged."""


def _checked(content: bytes) -> CachedRows:
    from safetensors import SafetensorError
    from safetensors.numpy import load as parsed

    try:
        arrays = parsed(content)
        if json.loads(arrays.pop("digest").tobytes()) != _digest(arrays):
            raise _DamagedError("the checksum does not match")
        parts = [
            TokenRows(
                **{each: arrays[f"{name}.{each}"] for each in ("tokens", "learnt", "offsets")}
            )
            for name in ("train", "validation")
            if f"{name}.tokens" in arrays
        ]
        about = json.loads(arrays["about"].tobytes())
        return CachedRows(parts[0], parts[1] if len(parts) > 1 else None, about)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _DamagedError(type(error).__name__) from error


def _path(folder: Path, key: str) -> Path:
    return folder / f"tokens-{key[:32]}.safetensors"


def _as_array(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    names = sorted(arrays)
    return f"{' '.join(names)} {fingerprint(*(arrays[name] for name in names))}"


def _content(source: Source) -> str:
    """Return a SHA-256 of the content of a source."""
    content = hashlib.sha256(source.name.encode() if source.file is None else b"")
    pieces = _bytes(source.file) if source.file is not None else map(_row_bytes, source.rows())
    for piece in pieces:
        content.update(piece)
    # The same bytes are other rows in another file type.
    ending = "" if source.file is None else "".join(source.file.suffixes[-2:]).lower()
    return f"{content.hexdigest()} {ending}"


def _bytes(path: Path) -> Iterable[bytes]:
    try:
        with open_plain(path, follow=True) as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


def _row_bytes(row: Row) -> bytes:
    return json.dumps(dict(row.values), sort_keys=True, default=str).encode()


def split_rows(
    rows: TokenRows, share: float, *, seed: int, pairs: bool = False
) -> tuple[TokenRows, TokenRows | None]:
    """Return training and validation rows, split by seed and content: equal rows stay together.

    Of `pairs`, two rows each, those with the same prompt stay together.
    """
    if share == 0:
        return rows, None
    drawn = _digests(rows, seed, pairs=pairs)
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


def _digests(rows: TokenRows, seed: int, *, pairs: bool = False) -> list[bytes]:
    """Return what tells rows apart, of pairs their prompt."""
    key = seed.to_bytes(8, "little")

    def content(number: int) -> bytes:
        if not pairs:
            return rows.row(number)[0].tobytes()
        tokens, learnt = rows.row(number - number % 2)
        return tokens[: int(np.argmax(learnt))].tobytes()

    return [
        hashlib.blake2b(content(number), key=key, digest_size=16).digest()
        for number in range(len(rows))
    ]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Summary of the prepared data."""

    formats: tuple[str, ...]
    template: str
    rows_read: int
    pairs: bool = False
    """Whether two rows each are a pair of preferences."""
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
        formats, what = ", ".join(self.formats), "pairs" if self.pairs else "rows"
        each = 2 if self.pairs else 1
        said = [
            f"{self.rows_read:,} rows read as {formats}, rendered with template {self.template}: "
            f"{self.train_rows // each:,} training {what}, "
            f"{self.validation_rows // each:,} validation {what}",
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

    train: Packs | PairedRows
    validation: Packs | PairedRows | None
    report: DataReport
    template: Template | None = None
    """None for a plan, which reads no data."""

    @property
    def shown(self) -> TokenRows | None:
        """The validation rows to show samples of, of pairs the chosen ones."""
        held = self.validation
        if isinstance(held, PairedRows):
            return held.rows.taken(range(0, len(held.rows), 2))
        return None if held is None else held.rows

    def digest(self) -> str:
        """Return a fingerprint of all tokens and loss masks."""
        parts = [self.train, *([self.validation] if self.validation is not None else [])]
        return fingerprint(*(array for part in parts for array in part.rows.arrays().values()))


NO_DATA = PreparedData(
    train=Packs(rows=TokenRows.joined([]), packs=(), padding=0, width=None),
    validation=None,
    report=DataReport(formats=(), template="", rows_read=0),
)
"""Data of a plan."""


def prepare_data(data: SftData, tokenizer: Any, *, seed: int, pairs: bool = False) -> PreparedData:
    """Read, filter, tokenise, split and pack the data of a recipe; `pairs` are preferences."""
    template = select_template(
        data.template_format,
        tokenizer,
        instruction_template=data.instruction_template,
        loss_on=data.loss_on,
    )
    sources = find_sources(data)
    stored, cached, note = _cached_rows(sources, template, data, pairs=pairs)
    train, validation = stored.train, stored.validation
    if validation is None:
        train, validation = split_rows(train, data.validation_split, seed=seed, pairs=pairs)
    padding = padding_token(tokenizer)
    training = _batches(train, data, padding, pairs=pairs)
    report = DataReport(
        **{**stored.about, "formats": tuple(stored.about["formats"])},
        template=template.name,
        pairs=pairs,
        train_rows=len(train),
        validation_rows=0 if validation is None else len(validation),
        repeated_rows=0 if stored.validation is None else rows_in_both(train, stored.validation),
        tokens=len(train.tokens),
        learnt_tokens=int(train.learnt.sum()),
        packs=len(train) if pairs else len(training),
        efficiency=training.efficiency,
        cached=cached,
        notes=(*sources.notes, *([note] if note else [])),
    )
    held = None
    if validation is not None:
        held = _batches(validation, data, padding, pairs=pairs, first=len(training))
    return PreparedData(train=training, validation=held, report=report, template=template)


def _batches(
    rows: TokenRows, data: SftData, padding: int, *, pairs: bool, first: int = 0
) -> Packs | PairedRows:
    if pairs:
        return PairedRows(rows=rows, padding=padding, flat=data.packing, first=first)
    if not data.packing:
        return Packs(rows=rows, packs=alone(len(rows)), padding=padding, width=None)
    packs = packed(rows.lengths.tolist(), data.max_seq_length)
    return Packs(rows=rows, packs=packs, padding=padding, width=data.max_seq_length)


def _cached_rows(
    sources: Sources, template: Template, data: SftData, *, pairs: bool
) -> tuple[CachedRows, bool, str]:
    """Return the tokens, whether they were cached, and a note on a damaged cache."""
    if not data.pretokenize:
        return _tokenised(sources, template, data, pairs=pairs), False, ""
    folder, key = token_cache_folder(data), cache_key(sources, template, data, pairs=pairs)
    result, note = load_tokens(folder, key)
    if result is not None:
        return result, True, ""
    made = _tokenised(sources, template, data, pairs=pairs)
    save_tokens(folder, key, made)
    return made, False, note


def _tokenised(sources: Sources, template: Template, data: SftData, *, pairs: bool) -> CachedRows:
    tally, encoder = Tally(), Encoder.of(template, data)
    train = _rows(sources.train, encoder, tally, key="path", pairs=pairs)
    held = sources.validation
    validation = None
    if held:
        validation = _rows(held, encoder, tally, key="validation_path", pairs=pairs)
    return CachedRows(train, validation, tally.to_json())


def _rows(
    sources: Sequence[Source], encoder: Encoder, tally: Tally, *, key: str, pairs: bool
) -> TokenRows:
    data, matched = encoder.data, []
    for source in sources:
        if pairs:
            paired = Pairs(source.rows(), data.format)
            matched += list(pair_rows(paired, encoder, tally))
            count, form = paired.count, paired.format
        else:
            read = Conversations(source.rows(), data.format, data.columns)
            matched += list(encoder.rows(filter_rows(read, data, tally), tally))
            count, form = read.count, read.format
        tally.rows_read += count
        if form is not None:
            tally.formats.add(form.name)
    if not matched:
        why = ", ".join(f"{count}: {reason}" for reason, count in tally.dropped.items())
        raise ConfigError(
            f"data.{key}: no rows are left ({why}). Change the settings that drop rows."
        )
    return TokenRows.joined(matched)
