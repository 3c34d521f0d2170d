"""Readers of what the field writes: records, features and variants, one after another."""

from narrowcast.workloads.genomics.sequences.readers.gff import read_features
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Record
from narrowcast.workloads.genomics.sequences.readers.tables import Row, read_table
from narrowcast.workloads.genomics.sequences.readers.vcf import (
    Variant,
    VariantColumns,
    read_variants,
)

__all__ = [
    "Record",
    "Row",
    "Variant",
    "VariantColumns",
    "read_features",
    "read_records",
    "read_table",
    "read_variants",
]
