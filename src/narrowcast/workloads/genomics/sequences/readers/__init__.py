"""Readers of what the field writes: records, features and variants, one after another."""

from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Feature, Part, Record
from narrowcast.workloads.genomics.sequences.readers.tables import Row, read_table

__all__ = ["Feature", "Part", "Record", "Row", "read_records", "read_table"]
