"""Variants of a VCF or of a table."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.record import (
    HEAD_BYTES,
    Reader,
    decode_text,
    opened,
    record_location,
)
from narrowcast.workloads.genomics.sequences.readers.tables import read_rows, table_format

_PER_ALLELE = re.compile(rb"##INFO=<(?:.*,)?ID=(?P<key>[^,>]+),Number=(?P<number>[AR])[,>]")
"""INFO entries with one value per alternative (A) or allele (R)."""

_FIXED = ("CHROM", "POS", "ID", "REF", "ALT", "QUAL", "FILTER", "INFO")


class VariantColumns(NamedTuple):
    """Columns of a table of variants."""

    chrom: str = "chrom"
    position: str = "pos"
    reference: str = "ref"
    alternative: str = "alt"


COLUMNS = VariantColumns()
_OF_VCF = VariantColumns("CHROM", "POS", "REF", "ALT")


@final
@dataclass(frozen=True, kw_only=True)
class Variant:
    """One alternative allele at a position."""

    chrom: str
    position: int
    """Of the first reference letter, from 1."""
    reference: str
    alternative: str
    """Upper-case letters, or a VCF symbol such as <DEL> or *."""
    number: int
    file: Path
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Position and alleles."""
        return f"{self.chrom}:{self.position}{self.reference}>{self.alternative}"

    @property
    def location(self) -> str:
        """File and record, for messages."""
        return record_location(self.file, self.number)


@final
@dataclass
class Skipped:
    """Counts records without an alternative."""

    records: int = 0
    first: str = ""

    def add(self, location: str) -> None:
        self.records, self.first = self.records + 1, self.first or location

    @property
    def note(self) -> str:
        """The note for the user; empty if nothing was skipped."""
        if not self.records:
            return ""
        return (
            f"left out {self.records:,} records without an alternative (ALT is .); the first is "
            f"{self.first}"
        )


def read_variants(
    path: Path, columns: VariantColumns = COLUMNS, *, skipped: Skipped | None = None
) -> Iterator[Variant]:
    """Yield the variants of a VCF, or of a table with `columns`, one per alternative."""
    without = Skipped() if skipped is None else skipped
    per_allele: dict[str, str] = {}
    number = variants = 0
    with opened(path, lambda: record_location(path, number + 1)) as file:
        head = file.peek(HEAD_BYTES)
        if head.lstrip().startswith(b">"):
            raise ConfigError(
                f"{shown_path(path)} has sequences but no variants. Give a VCF, or a table with "
                f"{', '.join(columns)}. To read sequences, leave the reference out."
            )
        if head.lstrip().startswith(b"##fileformat=VCF"):
            columns = _OF_VCF
            rows = _records(file, path, per_allele)
        else:
            kind = table_format(head, path)
            rows = read_rows(file, path, kind, columns, {columns.position: "position"})
        for values, number in rows:
            for variant in _variants(values, columns, path, number, per_allele, without):
                variants += 1
                yield variant
    if not variants:
        why = f": {columns.alternative} is . in every record" if number else ""
        raise ConfigError(f"{shown_path(path)} has no variants{why}. Give a file with variants.")


def _records(
    file: Reader, path: Path, per_allele: dict[str, str]
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield records by column; collects INFO entries of Number A or R in `per_allele`."""
    names: Sequence[str] = ()
    number = 0
    for line in file:
        if message := _PER_ALLELE.match(line):
            per_allele[decode_text(message["key"], shown_path(path))] = message["number"].decode()
        if line.startswith(b"##") or not line.strip():
            continue
        location = record_location(path, number + 1)
        columns = decode_text(line, location).rstrip("\r\n").split("\t")
        if line.startswith(b"#"):
            names = [columns[0][1:], *columns[1:]]
            if tuple(names[: len(_FIXED)]) != _FIXED:
                raise ConfigError(
                    f"{shown_path(path)}: the #CHROM line must have {', '.join(_FIXED)}, separated "
                    f"by tabs, got {shortened(', '.join(names))}."
                )
            continue
        number += 1
        if not names:
            raise ConfigError(
                f"{location}: there is no #CHROM line before it. Add the line that names the "
                "columns."
            )
        if len(columns) != len(names):
            raise ConfigError(f"{location} must have {len(names)} columns, got {len(columns)}.")
        values = dict(zip(names, columns, strict=True))
        yield {**values, "INFO": _info(values["INFO"])}, number


def _info(text: str) -> Mapping[str, Any]:
    pieces = (piece.partition("=") for piece in text.split(";") if piece not in ("", "."))
    return {key: value if equals else True for key, equals, value in pieces}


def _own(info: Mapping[str, Any], per_allele: Mapping[str, str], at: int, count: int) -> Any:
    """Return INFO for the alternative `at` of `count`; entries with another count stay whole."""
    own = dict(info)
    for key in per_allele.keys() & info.keys():
        pieces = str(info[key]).split(",")
        before = 1 if per_allele[key] == "R" else 0  # the reference comes first
        if len(pieces) == before + count:
            own[key] = pieces[before + at]
    return own


def _variants(
    values: Mapping[str, Any],
    columns: VariantColumns,
    path: Path,
    number: int,
    per_allele: Mapping[str, str],
    without: Skipped,
) -> Iterator[Variant]:
    location = record_location(path, number)
    position, reference = str(values[columns.position]), str(values[columns.reference]).upper()
    if not (position.isascii() and position.isdigit() and int(position) > 0):
        raise ConfigError(
            f"{location}: {columns.position} must be a whole number from 1, got "
            f"{shortened(position)!r}."
        )
    if not reference.isalpha():
        raise ConfigError(
            f"{location}: {columns.reference} must be letters, got {shortened(reference)!r}."
        )
    fields = {key: value for key, value in values.items() if key not in columns}
    alternatives = str(values[columns.alternative]).split(",")
    for at, alternative in enumerate(alternatives):
        if alternative == ".":
            without.add(location)
            continue
        if not alternative:
            raise ConfigError(
                f"{location}: {columns.alternative} is empty. Write . for no alternative."
            )
        yield Variant(
            chrom=str(values[columns.chrom]),
            position=int(position),
            reference=reference,
            alternative=alternative.upper() if alternative.isalpha() else alternative,
            number=number,
            file=path,
            fields={**fields, "INFO": _own(fields["INFO"], per_allele, at, len(alternatives))}
            if per_allele
            else fields,
        )
