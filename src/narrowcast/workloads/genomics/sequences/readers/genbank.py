"""GenBank records by biopython; its parser warnings raise."""

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from narrowcast.config.problems import shortened, shown_path
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.record import (
    Feature,
    Part,
    Raw,
    Strand,
    record_location,
)

INSTALL = "narrowcast[genomics]"


def genbank(file: BinaryIO, path: Path) -> Iterator[Raw]:
    """Yield records with their features, and `description`, `organism` and `circular`."""
    require_modules(["Bio"], of=f"{shown_path(path)}: to read GenBank", install=INSTALL)
    from Bio import SeqIO

    parse: Any = SeqIO.parse  # it has no types
    with io.TextIOWrapper(file, encoding="utf-8") as text:
        parsed, number = parse(text, "genbank"), 1
        while (entry := _next(parsed, record_location(path, number))) is not None:
            yield _raw(entry, record_location(path, number))
            number += 1


def _next(parsed: Iterator[Any], location: str) -> Any:
    from Bio import BiopythonParserWarning

    # Around one record only: between two of them warnings are the caller's.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", BiopythonParserWarning)
        try:
            entry = next(parsed, None)
        except _DAMAGED as error:
            raise ConfigError(
                f"{location} cannot be read as GenBank: {_line(error)}. The file may be truncated; "
                "copy it again."
            ) from error
    for warning in said:
        # Other programs lay out the first line in their own way, and nothing is lost by that.
        text = _line(warning.message)
        if (
            issubclass(warning.category, BiopythonParserWarning)
            and "locus line" not in text.lower()
        ):
            raise ConfigError(f"{location}: {text}. The file may be truncated; copy it again.")
    return entry


def _line(said: object) -> str:
    return shortened(" ".join(str(said).split()), 200).removesuffix(".")


_DAMAGED = (ValueError, AssertionError, LookupError, AttributeError, TypeError)
"""Errors of biopython's parser for truncated or changed lines."""


def _raw(entry: Any, position: str) -> Raw:
    from Bio.Seq import UndefinedSequenceError

    try:
        letters = bytes(entry.seq)
    except UndefinedSequenceError as error:
        raise ConfigError(
            f"{position} has no sequence, only a reference to it (CONTIG). Download it with its "
            "sequence (GenBank full)."
        ) from error
    said = entry.annotations
    fields = {
        "description": entry.description,
        "organism": said.get("organism", ""),
        "circular": said.get("topology") == "circular",
    }
    features = (_feature(each, entry.id) for each in entry.features)
    return Raw(entry.id, letters, fields, tuple(each for each in features if each.parts))


def _feature(feature: Any, name: str) -> Feature:
    """Return a feature without parts on other records."""
    parts = [
        Part(int(part.start), int(part.end), _strand(part.strand))
        for part in feature.location.parts
        if part.ref is None
    ]
    qualifiers = {key: tuple(map(str, values)) for key, values in feature.qualifiers.items()}
    return Feature(kind=feature.type, parts=tuple(parts), record=name, qualifiers=qualifiers)


def _strand(value: int | None) -> Strand:
    return 1 if value == 1 else -1 if value == -1 else 0
