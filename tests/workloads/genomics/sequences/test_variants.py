from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.vcf import (
    Variant,
    VariantColumns,
    read_variants,
)
from narrowcast.workloads.genomics.sequences.variants import Contig, Reference, variant_pairs

FILE = Path("variants.vcf")


def variant(position, reference, alternative, chrom="chr1"):
    return Variant(
        chrom=chrom, position=position, reference=reference, alternative=alternative,
        number=7, file=FILE,
    )  # fmt: skip


def reference(sequence, first=1):
    return Reference(Path("r.fa"), (Contig(chrom="1", first=first, sequence=sequence),))


@given(
    genome=st.text("ACGT", min_size=1, max_size=30),
    length=st.integers(8, 25),
    first=st.integers(1, 1000),
    data=st.data(),
)
def test_windows_are_cut_from_the_reference_and_from_the_changed_genome(
    genome, length, first, data
):
    at = data.draw(st.integers(0, len(genome) - 1))
    ref = genome[at : at + data.draw(st.integers(1, 4))]
    alt = data.draw(st.text("ACGT", min_size=1, max_size=6))
    (pair,) = variant_pairs([variant(first + at, ref, alt)], reference(genome, first), length)
    # A genome with unknown letters around it, so that every window lies within.
    wide = "N" * length + genome + "N" * 2 * length
    changed = "N" * length + genome[:at] + alt + genome[at + len(ref) :] + "N" * 2 * length
    start = length + at - pair.at
    assert pair.reference == wide[start : start + length]
    assert pair.alternative == changed[start : start + length]
    assert pair.alternative[pair.at :].startswith(alt)
    # In the middle: as many letters on the left of the longer allele as on its right, or one less.
    right = length - pair.at - max(len(ref), len(alt))
    assert right - pair.at in (0, 1)


@pytest.mark.parametrize(
    ("given_variant", "message"),
    [
        (variant(2, "G", "T"), "record 7: the reference of chr1:2 is G, but r.fa has C"),
        (variant(9, "A", "T"), "record 7: chr1:9 is not in r.fa, which has 1:1-4"),
        (variant(4, "TA", "T"), "chr1:4 is not in r.fa"),
        (variant(1, "A", "T", "chr2"), "chr2:1 is not in r.fa, which has 1:1-4"),
        (variant(1, "A", "<DEL>"), "the alternative must be a sequence, got '<DEL>'"),
        (variant(1, "A", "*"), "must be a sequence"),
        (variant(1, "A", "ACGTACGTA"), "an allele has 9 letters, more than the window of 8"),
    ],
)
def test_variants_that_do_not_fit_are_refused_with_file_and_record(given_variant, message):
    with pytest.raises(ConfigError, match=message):
        list(variant_pairs([given_variant], reference("ACGT"), 8))


def test_names_of_regions_say_where_a_contig_begins(tmp_path):
    path = tmp_path / "r.fa"
    path.write_text(">chr17:101-104\nacgt\n>M\nTT\n")
    whole = Reference.read(path)
    assert [(c.chrom, c.first, c.last) for c in whole.contigs] == [
        ("chr17", 101, 104), ("M", 1, 2),
    ]  # fmt: skip
    assert whole.find_contig(variant(102, "C", "T", "17")).sequence == "ACGT"
    assert whole.find_contig(variant(1, "T", "G", "chrMT")).chrom == "M"
    path.write_text(">chr17:101-105\nacgt\n")
    with pytest.raises(ConfigError, match="record 1 is named chr17:101-105, which is 5 letters"):
        Reference.read(path)


def test_all_of_brca1_fits_its_piece_of_hg19(shared):
    folder = shared("brca1_sge")
    hg19 = Reference.read(folder / "chr17_hg19_41176312_41370000.fa.gz")
    table = folder / "brca1_sge_3893.csv.gz"
    variants = list(read_variants(table, VariantColumns(position="pos_hg19")))
    pairs = list(variant_pairs(variants, hg19, 201))
    assert len(pairs) == 3893
    for pair in pairs:
        differ = [i for i in range(201) if pair.reference[i] != pair.alternative[i]]
        assert differ == [pair.at] == [100]
        assert pair.alternative[100] == pair.variant.alternative
    shifted = Variant(
        chrom="17", position=variants[0].position - 2, reference=variants[0].reference,
        alternative="A", number=1, file=table,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"brca1_sge_3893.csv.gz, record 1: the reference of 17"):
        list(variant_pairs([shifted], hg19, 201))
