"""Windows around variants, with the reference and with the alternative."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, final

from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.vcf import Variant

_REGION = re.compile(r"(?P<chrom>.+):(?P<first>\d+)-(?P<last>\d+)")
"""Region names of samtools, from 1, both ends included."""


@final
@dataclass(frozen=True, kw_only=True)
class Contig:
    """A chromosome or a region of one."""

    chrom: str
    first: int
    """Position of its first letter, from 1."""
    sequence: str

    @property
    def last(self) -> int:
        return self.first + len(self.sequence) - 1


class VariantPair(NamedTuple):
    """Two windows of one length and start."""

    reference: str
    alternative: str
    at: int
    """Offset of the variant in both."""
    variant: Variant


@final
@dataclass(frozen=True)
class Reference:
    """Contigs of a reference, in memory."""

    file: Path
    contigs: tuple[Contig, ...]

    @staticmethod
    def read(path: Path) -> "Reference":
        """Read a FASTA; a record named chr17:41176312-41370000 is that piece of chr17."""
        contigs = []
        for record in read_records(path, alphabet=DNA):
            contig = Contig(chrom=record.name, first=1, sequence=record.sequence)
            if region := _REGION.fullmatch(record.name):
                start, last = int(region["first"]), int(region["last"])
                contig = Contig(chrom=region["chrom"], first=start, sequence=record.sequence)
                if contig.last != last:
                    raise ConfigError(
                        f"{record.location} is named {shortened(record.name)}, which is "
                        f"{last - start + 1} letters, but has {len(record.sequence)}. Rename it, "
                        "or give the whole region."
                    )
            contigs.append(contig)
        return Reference(path, tuple(contigs))

    @cached_property
    def _by_chrom(self) -> dict[str, list[Contig]]:
        """Contigs by chromosome without the prefix chr."""
        results: dict[str, list[Contig]] = {}
        for contig in self.contigs:
            results.setdefault(_plain(contig.chrom), []).append(contig)
        return results

    def find_contig(self, variant: Variant) -> Contig:
        """Return the contig of a variant; chr17 and 17 are the same."""
        named = self._by_chrom.get(_plain(variant.chrom), [])
        end = variant.position + len(variant.reference) - 1
        for contig in named:
            if contig.first <= variant.position and end <= contig.last:
                return contig
        pieces = [f"{each.chrom}:{each.first}-{each.last}" for each in named or self.contigs]
        raise ConfigError(
            f"{variant.location}: {shortened(variant.chrom)}:{variant.position} is not in "
            f"{shown_path(self.file)}, which has {shortened(', '.join(pieces), 200)}. "
            + (
                "Check that both are of the same assembly."
                if named
                else "Use the chromosome names of the FASTA (bcftools annotate --rename-chrs)."
            )
        )


def variant_pairs(
    variants: Iterable[Variant], reference: Reference, length: int
) -> Iterator[VariantPair]:
    """Yield two windows of `length` letters per variant, N beyond the ends of a contig."""
    for variant in variants:
        if not DNA.fits(variant.alternative) or not variant.alternative.isalpha():
            raise ConfigError(
                f"{variant.location}: the alternative must be a sequence, got "
                f"{shortened(variant.alternative)!r}. Remove such variants (bcftools view -v "
                "snps,indels)."
            )
        longest = max(len(variant.reference), len(variant.alternative))
        if longest > length:
            raise ConfigError(
                f"{variant.location}: an allele has {longest} letters, more than the window of "
                f"{length}. Write longer windows, or remove the variant."
            )
        contig = reference.find_contig(variant)
        start = variant.position - contig.first
        end = start + len(variant.reference)
        letters = contig.sequence[start:end]
        if letters != variant.reference:
            raise ConfigError(
                f"{variant.location}: the reference of {shortened(variant.chrom)}:"
                f"{variant.position} is {shortened(variant.reference)}, but "
                f"{shown_path(reference.file)} has {shortened(letters)}. Check the assembly, and "
                "that positions count from 1."
            )
        at = (length - longest) // 2
        left = _letters(contig.sequence, start - at, start)
        right = _letters(contig.sequence, end, end + length)
        yield VariantPair(
            (left + letters + right)[:length],
            (left + variant.alternative + right)[:length],
            at,
            variant,
        )


def _letters(sequence: str, start: int, end: int) -> str:
    """Return letters of a sequence, N beyond its ends."""
    inside = sequence[max(start, 0) : max(end, 0)]
    before = DNA.unknown * (min(end, 0) - min(start, 0))
    return before + inside + DNA.unknown * (end - start - len(before) - len(inside))


def _plain(chrom: str) -> str:
    plain = chrom[3:] if chrom.lower().startswith("chr") else chrom
    return "MT" if plain == "M" else plain
