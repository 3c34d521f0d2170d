from collections import Counter

import numpy as np
import pytest
from Bio.Seq import reverse_complement as bio_reverse_complement
from Bio.Seq import reverse_complement_rna
from Bio.SeqUtils import gc_fraction
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA, PROTEIN, RNA
from narrowcast.workloads.genomics.sequences.features import Part
from narrowcast.workloads.genomics.sequences.operations import (
    either_strand,
    extract,
    gc,
    kmer_counts,
    mutate,
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


def test_either_strand_is_each_half_of_the_time():
    generator = np.random.default_rng(0)
    seen = Counter(either_strand("AAC", generator) for _ in range(400))
    assert set(seen) == {"AAC", "GTT"}
    # Five standard deviations of a fair coin.
    assert abs(seen["AAC"] - 200) < 5 * 10


@given(text=st.text("ACGTUSWNRacgtu"))
def test_gc_is_biopythons(text):
    assert gc(text) == pytest.approx(gc_fraction(text, ambiguous="remove"), abs=1e-15)


@given(text=st.text("ACGTN", max_size=50), k=st.integers(1, 4))
def test_kmer_counts_are_those_of_counting(text, k):
    runs = (text[at : at + k] for at in range(len(text) - k + 1))
    assert kmer_counts(text, k) == Counter(run for run in runs if "N" not in run)


@given(
    length=st.integers(1, 12),
    stride=st.integers(1, 12),
    text=st.text("ACGT", max_size=40),
    tail=st.sampled_from(["short", "shift", "drop"]),
)
def test_windows_are_where_they_say_and_lose_nothing_unless_told(length, stride, text, tail):
    windows = list(sliding_windows(text, length, stride, tail=tail))
    assert all(text[at : at + len(window)] == window for at, window in windows)
    assert len({at for at, _ in windows}) == len(windows)
    whole = [at for at in range(0, len(text), stride) if at + length <= len(text)]
    if tail == "drop":
        # Up to the first that reaches the end; the next would begin behind it.
        assert [at for at, _ in windows] == whole
    if tail == "shift":
        assert all(len(window) == min(length, len(text)) for _, window in windows)
    if tail != "drop" and stride <= length:
        covered = {at + i for at, window in windows for i in range(len(window))}
        assert covered == set(range(len(text)))


def test_windows_without_letters_are_refused():
    with pytest.raises(ConfigError, match="must be at least 1"):
        list(sliding_windows("ACGT", 0, 1))


def test_mutations_come_at_their_rates():
    generator = np.random.default_rng(1)
    text = "ACGTN" * 20_000
    changed = mutate(text, generator, substitutions=0.1)
    differ = [a != b for a, b in zip(text, changed, strict=True)]
    # Five standard deviations of 80,000 letters, each changed one time in ten.
    assert abs(sum(differ) - 8000) < 5 * (80_000 * 0.09) ** 0.5
    assert changed.count("N") == 20_000
    assert len(mutate(text, generator, deletions=1.0)) == 20_000
    assert len(mutate(text, generator, insertions=1.0)) == 2 * len(text)
    assert mutate(text, generator) == text
    assert set(mutate("MKV" * 100, generator, alphabet=PROTEIN, substitutions=1.0)) <= set(
        PROTEIN.letters
    )


def test_rates_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"deletions must be .* got 2"):
        mutate("ACGT", np.random.default_rng(0), deletions=2)


def test_parts_are_read_each_on_its_strand():
    assert extract("AACCGGTT", [Part(6, 8, 1), Part(0, 3, 1)]) == "TTAAC"
    assert extract("AACCGGTT", [Part(4, 6, -1), Part(0, 3, -1)]) == "CCGTT"
    assert kmer_counts("", 3, DNA) == {}
