from collections import Counter

import pytest
from Bio.Seq import reverse_complement as bio_reverse_complement
from Bio.Seq import reverse_complement_rna
from Bio.SeqUtils import gc_fraction
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import PROTEIN, RNA
from narrowcast.workloads.genomics.sequences.operations import (
    gc,
    kmer_counts,
    reverse_complement,
    sliding_windows,
)

IUPAC = "ACGTRYSWKMBDHVN"


@given(text=st.text(IUPAC + IUPAC.lower()))
def test_reverse_complement_is_biopythons(text):
    assert reverse_complement(text) == bio_reverse_complement(text)
    rna = text.replace("T", "U").replace("t", "u")
    assert reverse_complement(rna, RNA) == reverse_complement_rna(rna)


def test_proteins_have_no_other_strand():
    with pytest.raises(ConfigError, match="protein has no reverse complement"):
        reverse_complement("MK", PROTEIN)


@given(text=st.text("ACGTUSWNRacgtu"))
def test_gc_is_biopythons(text):
    assert gc(text) == pytest.approx(gc_fraction(text, ambiguous="remove"), abs=1e-15)


@given(text=st.text("ACGTN", max_size=50), k=st.integers(1, 4))
def test_kmer_counts_are_those_of_counting(text, k):
    runs = (text[at : at + k] for at in range(len(text) - k + 1))
    assert kmer_counts(text, k) == Counter(run for run in runs if "N" not in run)


@given(length=st.integers(1, 12), stride=st.integers(1, 12), text=st.text("ACGT", max_size=40))
def test_windows_are_where_they_say_and_lose_nothing_within_reach(length, stride, text):
    windows = list(sliding_windows(text, length, stride))
    assert all(text[at : at + length] == window for at, window in windows)
    assert [at for at, _ in windows] == [stride * number for number in range(len(windows))]
    assert sum(at + length >= len(text) for at, _ in windows) <= 1
    if stride <= length:
        covered = {at + i for at, window in windows for i in range(len(window))}
        assert covered == set(range(len(text)))
