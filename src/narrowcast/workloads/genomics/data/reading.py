"""Rows out of files: tables of sequences, pairs of them, and genomes with what lies on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowcast.errors import RecipeError
from narrowcast.plain_files import path_of
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.features import Feature
from narrowcast.workloads.genomics.sequences.labels import base_labels, letter_labels
from narrowcast.workloads.genomics.sequences.readers.gff import read_features
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Record
from narrowcast.workloads.genomics.sequences.readers.vcf import VariantColumns, read_variants
from narrowcast.workloads.genomics.sequences.variants import Reference, variant_pairs
from narrowcast.workloads.genomics.settings import GenomicData, Objective


def read_rows(name: str, data: GenomicData, objective: Objective) -> list[Row]:
    """Return the rows of a file as the task of a recipe reads it."""
    path = path_of(name)
    match objective.task:
        case "generation":
            return [_plain(record) for record in _records(path, data)]
        case "annotation":
            return list(_annotated(path, data, objective.known_labels))
        case "variant_effect":
            return list(_variants(path, data))
        case _:
            return [_labelled(record, data) for record in _records(path, data)]


def _records(path: Path, data: GenomicData, *columns: str) -> Iterator[Record]:
    alphabet = ALPHABETS[data.alphabet]
    sequences = (data.sequence, *columns)
    return read_records(path, alphabet=alphabet, strict=data.strict, sequences=sequences)


def _plain(record: Record) -> Row:
    return Row(sequence=record.sequence, name=record.name, place=record.place)


def _labelled(record: Record, data: GenomicData) -> Row:
    return Row(
        sequence=record.sequence,
        label=_label(record.fields, data, record.place),
        name=record.name or f"{record.number}",
        place=record.place,
    )


def _label(fields: Mapping[str, Any], data: GenomicData, place: str) -> str:
    """Return the label of a column as text; refuse a row without one."""
    label = fields.get(data.label)
    if label is None or label == "":
        columns = ", ".join(fields) or "no columns beside the sequence"
        raise RecipeError(
            f"{place} has no label {data.label!r}: there are {columns}; name the column with "
            "data.label, and leave out rows without one"
        )
    return _text(label)


def _text(label: Any) -> str:
    """Write a label as text; of JSON, 1.0 and 1 and true are numbers, and lists are several."""
    if isinstance(label, list | tuple):
        return ";".join(_text(each) for each in label)
    if isinstance(label, bool):
        return str(int(label))
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label)


def _annotated(path: Path, data: GenomicData, classes: Sequence[str]) -> Iterator[Row]:
    """Yield sequences with a class for every letter, from a column or from features."""
    features = _features(data)
    # The first class is what lies between features.
    numbers = {name: number for number, name in enumerate(classes) if number}
    for record in _records(path, data):
        lying = record.features if features is None else features.get(record.name, [])
        if data.label in record.fields:
            letters = letter_labels(record, data.label, classes)
        elif lying or features is not None:
            letters = base_labels(
                len(record.sequence),
                lying,
                numbers,
                circular=bool(record.fields.get("circular", False)),
                place=record.place,
            )
        else:
            raise RecipeError(
                f"{record.place} has neither a column {data.label!r} nor features; give a GenBank "
                "file, a GFF of its features with data.features, or a table with classes of letters"
            )
        yield Row(sequence=record.sequence, letters=letters, name=record.name, place=record.place)


def _features(data: GenomicData) -> dict[str, list[Feature]] | None:
    """Return the features of a GFF by the sequence they lie on; none where none is named."""
    if not data.features:
        return None
    by_record: dict[str, list[Feature]] = {}
    for feature in read_features(path_of(data.features)):
        by_record.setdefault(feature.record, []).append(feature)
    return by_record


def _variants(path: Path, data: GenomicData) -> Iterator[Row]:
    """Yield pairs of sequences; or sequences by themselves, where no column has another."""
    if data.reference:
        yield from _beside_reference(path, data)
        return
    for record in _records(path, data):
        other = record.fields.get(data.alternative)
        if other is None:
            yield _labelled(record, data)
            continue
        alphabet = ALPHABETS[data.alphabet]
        cleaned = alphabet.clean(str(other), strict=data.strict, place=record.place)
        yield replace(_labelled(record, data), alternative=cleaned.sequence)


def _beside_reference(path: Path, data: GenomicData) -> Iterator[Row]:
    """Yield the surroundings of variants, without and with them."""
    reference = Reference.read(path_of(data.reference))
    columns = VariantColumns(position=data.position)
    for pair in variant_pairs(read_variants(path, columns), reference, data.max_length):
        variant = pair.variant
        yield Row(
            sequence=pair.reference,
            alternative=pair.alternative,
            label=_label(variant.fields, data, variant.place),
            name=f"{variant.chrom}:{variant.position}{variant.reference}>{variant.alternative}",
            place=variant.place,
        )
