"""Read the rows of a task from tables, sequence files, GFF and VCF."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.labels import base_labels, letter_labels
from narrowcast.workloads.genomics.sequences.readers.gff import read_features
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Feature, Record
from narrowcast.workloads.genomics.sequences.readers.vcf import (
    Skipped,
    Variant,
    VariantColumns,
    read_variants,
)
from narrowcast.workloads.genomics.sequences.variants import Reference, variant_pairs
from narrowcast.workloads.genomics.settings import GenomicData, Objective


def read_rows(
    name: str, data: GenomicData, objective: Objective, *, skipped: Skipped | None = None
) -> list[Row]:
    """Return the rows of a file; `skipped` counts records without an alternative."""
    path = expand_path(name)
    match objective.task:
        case "generation":
            return [row_from(record) for record in _records(path, data)]
        case "annotation":
            return list(_annotated(path, data, objective.known_labels))
        case "variant_effect" if data.reference:
            return list(_variant_windows(path, data, skipped))
        case "variant_effect":
            return [_pair(record, data) for record in _records(path, data)]
        case _:
            return [row_from(record, label=_label(record, data)) for record in _records(path, data)]


def _records(path: Path, data: GenomicData) -> Iterator[Record]:
    """Yield the records of a file; raise for an empty sequence."""
    alphabet = ALPHABETS[data.alphabet]
    for record in read_records(path, alphabet=alphabet, strict=data.strict, column=data.sequence):
        if not record.sequence:
            raise ConfigError(f"{record.location} has an empty sequence. Leave it out.")
        yield record


def row_from(record: Record, *, label: str = "") -> Row:
    """Return a record as a row."""
    name = record.name or f"{record.number}"
    return Row(sequence=record.sequence, label=label, name=name, location=record.location)


def _label(at: Record | Variant, data: GenomicData) -> str:
    """Return a label as text; raise if the row has none."""
    fields = {**at.fields, **at.fields.get("INFO", {})}  # the latter is where a VCF has them
    label = fields.get(data.label)
    missing = label == "." and isinstance(at, Variant)
    if (label is None and data.label in fields) or label == "" or missing:
        raise ConfigError(
            f"{at.location}: the label {data.label!r} is empty. Remove rows without a label, or "
            "write ; for no labels with objective.target=labels."
        )
    if label is None:
        columns = shortened(", ".join(fields) or "no columns beside the sequence", 200)
        raise ConfigError(
            f"{at.location} has no label {data.label!r}, got {columns}. Name the column with "
            "data.label, and remove rows without a label."
        )
    return _text(label, at.location)


def _text(label: Any, location: str) -> str:
    """Return a label as text: JSON true, 1 and 1.0 are '1', and lists are joined with ;."""
    match label:
        case str():
            return label
        case bool() | int():
            return str(int(label))
        case float() if math.isfinite(label):
            return str(int(label)) if label.is_integer() else str(label)
        case list():
            return ";".join(_text(each, location) for each in label)
    raise ConfigError(
        f"{location}: the label must be text, a finite number, or a list of these, got "
        f"{shortened(repr(label))}."
    )


def _annotated(path: Path, data: GenomicData, classes: Sequence[str]) -> Iterator[Row]:
    """Yield sequences with a class per letter, from a column or from features."""
    features = _features(data)
    # The first class is what lies between features.
    numbers = {name: number for number, name in enumerate(classes) if number}
    kinds: set[str] = set()
    result = False
    for record in _records(path, data):
        if data.label in record.fields:
            letters = letter_labels(record, data.label, classes)
        elif lying := _lying_on(record, data, features):
            letters = base_labels(
                len(record.sequence),
                lying,
                numbers,
                circular=bool(record.fields.get("circular", False)),
                location=record.location,
            )
            kinds |= {feature.kind for feature in lying}
        else:
            raise ConfigError(
                f"{record.location} has neither a column {data.label!r} nor features. Give a "
                "GenBank file, a GFF with data.features, or a table with one class per letter."
            )
        result = result or bool((letters > 0).any())
        yield replace(row_from(record), letters=letters)
    if kinds and not result:
        where = shown_path(expand_path(data.features) if data.features else path)
        wanted, there = (shortened(", ".join(each), 200) for each in (numbers, sorted(kinds)))
        raise ConfigError(
            f"{where} has no feature of {wanted}, got {there}. Name some of them with "
            "objective.labels, after the background class."
        )


def _lying_on(
    record: Record, data: GenomicData, features: Mapping[str, list[Feature]] | None
) -> Sequence[Feature]:
    """Return the features of a record; raise if the GFF has none for its name."""
    if features is None:
        return record.features
    if record.name not in features:
        raise ConfigError(
            f"{record.location}: {shortened(record.name)!r} has no feature in "
            f"{shown_path(expand_path(data.features))}, which has features on "
            f"{shortened(', '.join(features) or 'no sequence', 200)}. Use the same sequence names "
            "in both files, and remove sequences without features."
        )
    return features[record.name]


def _features(data: GenomicData) -> dict[str, list[Feature]] | None:
    """Return the features of data.features by sequence name; None without such a file."""
    if not data.features:
        return None
    by_record: dict[str, list[Feature]] = {}
    for feature in read_features(expand_path(data.features)):
        by_record.setdefault(feature.record, []).append(feature)
    return by_record


def _pair(record: Record, data: GenomicData) -> Row:
    """Return a row, with the alternative sequence if there is one."""
    row = row_from(record, label=_label(record, data))
    other = record.fields.get(data.alternative)
    if other is None:
        return row
    alphabet = ALPHABETS[data.alphabet]
    cleaned = alphabet.clean(str(other), strict=data.strict, location=record.location)
    return replace(row, alternative=cleaned)


def _variant_windows(path: Path, data: GenomicData, skipped: Skipped | None) -> Iterator[Row]:
    """Yield windows around variants, without and with the variant."""
    reference = Reference.read(expand_path(data.reference))
    columns = VariantColumns(position=data.position)
    variants = read_variants(path, columns, skipped=skipped)
    for pair in variant_pairs(variants, reference, data.max_length):
        variant = pair.variant
        yield Row(
            sequence=pair.reference,
            alternative=pair.alternative,
            label=_label(variant, data),
            site=f"{reference.find_contig(variant).chrom}:{variant.position}",
            name=variant.name,
            location=variant.location,
        )
