"""Read the sequences to predict for; labels are not needed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data.reading import row_from
from narrowcast.workloads.genomics.data.rows import Row, shortened
from narrowcast.workloads.genomics.inference.finished import Finished
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Record
from narrowcast.workloads.genomics.sequences.readers.vcf import (
    Skipped,
    Variant,
    VariantColumns,
    read_variants,
)
from narrowcast.workloads.genomics.sequences.variants import (
    Reference,
    VariantPair,
    variant_pairs,
)


@final
@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names of a table."""

    sequence: str = "sequence"
    alternative: str = "alternative"
    name: str | None = None
    position: str = "pos"


@final
class Reader:
    """Reads rows for a run, and counts those it cuts or skips."""

    def __init__(self, run: Finished, columns: Columns) -> None:
        self._run, self._columns = run, columns
        self.cut = 0
        """Sequences longer than the run's max_length."""
        self.skipped = Skipped()
        """Records without an alternative."""

    def rows(self, path: Path, reference: Path | None) -> Iterator[Row]:
        """Yield sequences, pairs or variant windows, cut to the run's max_length."""
        if not self._run.info.pairs:
            if reference is not None:
                raise ConfigError(
                    f"{self._run.name} was trained on single sequences, not on variants of a "
                    "reference. Leave --reference out."
                )
            yield from map(self._fitted, self.whole(path))
        elif reference is None:
            yield from map(self._fitted, self._pairs(path))
        else:
            for pair in self.variants(path, reference):
                yield Row(
                    sequence=pair.reference,
                    alternative=pair.alternative,
                    name=pair.variant.name,
                    location=pair.variant.location,
                )

    def whole(self, path: Path) -> Iterator[Row]:
        """Yield whole sequences of any length."""
        for record in self._records(path):
            if not record.sequence:
                raise ConfigError(f"{record.location} has an empty sequence. Leave it out.")
            yield row_from(record)

    def variants(self, path: Path, reference: Path) -> Iterator[VariantPair]:
        """Yield variants with their windows."""
        contigs = Reference.read(reference)
        return variant_pairs(self.listed(path), contigs, self._run.info.max_length)

    def listed(self, path: Path) -> Iterator[Variant]:
        """Yield the variants of a file."""
        self.skipped = Skipped()
        columns = VariantColumns(position=self._columns.position)
        return read_variants(path, columns, skipped=self.skipped)

    def _pairs(self, path: Path) -> Iterator[Row]:
        column = self._columns.alternative
        for record in self._records(path):
            other = record.fields.get(column)
            if not isinstance(other, str) or not other or not record.sequence:
                raise ConfigError(
                    f"{record.location} has no column {column!r}, but {self._run.name} was trained "
                    "on pairs. Name the column with --alternative, or give variants with their "
                    "--reference."
                )
            cleaned = self._run.alphabet.clean(other, location=record.location)
            yield replace(row_from(record), alternative=cleaned)

    def _records(self, path: Path) -> Iterator[Record]:
        columns = self._columns
        return read_records(
            path, alphabet=self._run.alphabet, column=columns.sequence, name=columns.name
        )

    def _fitted(self, row: Row) -> Row:
        (fitted,), cut = shortened([row], self._run.info.max_length)
        self.cut += cut
        return fitted
