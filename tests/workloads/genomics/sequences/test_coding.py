import itertools

import pytest
from Bio.Data import CodonTable
from Bio.Seq import Seq
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.coding import orfs, translate
from narrowcast.workloads.genomics.sequences.features import Part
from narrowcast.workloads.genomics.sequences.genetic_codes import BY_CONTEXT, CODES
from narrowcast.workloads.genomics.sequences.operations import extract

CODONS = ["".join(each) for each in itertools.product("ACGT", repeat=3)]
AMBIGUOUS = ["".join(each) for each in itertools.product("ACGTRYSWKMBDHVN", repeat=3)]


def test_all_genetic_codes_of_biopython_are_here():
    tables = CodonTable.unambiguous_dna_by_id
    both = {number for number, t in tables.items() if set(t.stop_codons) & set(t.forward_table)}
    assert set(BY_CONTEXT) == both
    assert set(CODES) == set(tables) - both


@pytest.mark.parametrize("code", CODES)
def test_every_codon_of_every_code_is_what_biopython_says(code):
    text = "".join(CODONS)
    assert translate(text, code) == str(Seq(text).translate(table=code))
    assert translate(text.replace("T", "U"), code) == translate(text, code)


@pytest.mark.parametrize("code", [1, 2, 11])
def test_ambiguous_codons_are_what_biopython_says(code):
    text = "".join(AMBIGUOUS)
    assert translate(text, code) == str(Seq(text).translate(table=code))


@given(text=st.text("ACGTacgt", max_size=60))
def test_proteins_end_before_the_first_stop(text):
    whole = text[: len(text) // 3 * 3]
    assert translate(text) == str(Seq(whole).translate())
    assert translate(text, to_stop=True) == str(Seq(whole).translate(to_stop=True))


def test_codes_and_letters_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"one of 1, .* got 7"):
        translate("ATG", 7)
    with pytest.raises(ConfigError, match="got 27: some of its codons"):
        orfs("ATG", code=27)
    with pytest.raises(ConfigError, match="DNA or RNA letters, got 'A-G'"):
        translate("A-G")


def brute_force(text, min_length, code, starts):
    """All frames by their definition, a codon after another."""
    found = []
    for strand in (1, -1):
        letters = text if strand > 0 else str(Seq(text).reverse_complement())
        for frame in range(3):
            begin = None
            for at in range(frame, len(letters) - 2, 3):
                codon = letters[at : at + 3]
                if begin is None and codon in starts:
                    begin = at
                elif "N" not in codon and str(Seq(codon).translate(table=code)) == "*":
                    if begin is not None and at + 3 - begin >= min_length:
                        ends = (begin, at + 3)
                        if strand < 0:
                            ends = (len(letters) - ends[1], len(letters) - ends[0])
                        found.append(Part(*ends, strand))
                    begin = None
    return sorted(found)


@settings(max_examples=60)
@given(
    pieces=st.lists(st.sampled_from(["ATG", "TAA", "TGA", "GTG", "A", "C", "CAT", "TTA", "N"])),
    min_length=st.integers(0, 15),
    code=st.sampled_from([1, 4, 11]),
    starts=st.sampled_from([("ATG",), ("ATG", "GTG")]),
)
def test_open_reading_frames_are_those_of_brute_force(pieces, min_length, code, starts):
    text = "".join(pieces)
    found = orfs(text, min_length=min_length, code=code, starts=starts)
    assert found == brute_force(text, min_length, code, starts)


def test_a_frame_reads_from_start_to_stop():
    text = "CCATGAAATGTTAAGG"
    assert orfs(text, min_length=0) == [Part(2, 14, 1)]
    assert translate(extract(text, orfs(text, min_length=12))) == "MKC*"
    assert orfs(text, min_length=13) == []


def test_starts_that_are_no_codons_are_refused():
    with pytest.raises(ConfigError, match="got 'AT'"):
        orfs("ATGTAA", starts=["AT"])
