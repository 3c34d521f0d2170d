import pytest
from Bio.Data import IUPACData
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import (
    ALPHABETS,
    DNA,
    PROTEIN,
    RNA,
    guess_alphabet,
)


def test_letters_are_those_of_iupac_as_biopython_lists_them():
    assert set(DNA.letters) == set(IUPACData.unambiguous_dna_letters)
    assert set(RNA.letters) == set(IUPACData.unambiguous_rna_letters)
    assert set(PROTEIN.letters) == set(IUPACData.protein_letters)
    assert set(DNA.letters + DNA.ambiguous + DNA.unknown) == set(IUPACData.ambiguous_dna_letters)
    assert set(RNA.letters + RNA.ambiguous + RNA.unknown) == set(IUPACData.ambiguous_rna_letters)
    known = set(PROTEIN.letters + PROTEIN.ambiguous + PROTEIN.unknown)
    assert known == set(IUPACData.extended_protein_letters)


@pytest.mark.parametrize(
    ("alphabet", "sequence", "cleaned"),
    [
        (DNA, "acgt\r\n AC\tgt", "ACGTACGT"),
        (DNA, "AUCG", "ATCG"),
        (RNA, "ATCG", "AUCG"),
        (DNA, "ARYN", "ANNN"),
        (PROTEIN, "mkB*uX", "MKX*XX"),
        (DNA, "", ""),
    ],
)
def test_cleaning(alphabet, sequence, cleaned):
    assert alphabet.clean(sequence) == cleaned
    assert alphabet.clean(sequence.encode()) == cleaned


@given(alphabet=st.sampled_from(list(ALPHABETS.values())), data=st.data())
def test_cleaning_twice_changes_nothing(alphabet, data):
    letters = alphabet.letters + alphabet.ambiguous + alphabet.unknown + alphabet.stop
    text = data.draw(st.text(letters + letters.lower() + " \n\r"))
    once = alphabet.clean(text)
    assert alphabet.clean(once) == once
    assert len(once) == len("".join(text.split()))


@pytest.mark.parametrize(
    ("alphabet", "sequence", "message"),
    [
        (
            DNA,
            "AC GTXA",
            "letter 5 is not a dna letter, got 'X'.* ATCG and, for ambiguity, NRYSWKMBDHV",
        ),
        (DNA, "MKVLE", "It reads as protein"),
        (DNA, "AC-GT", "Remove gaps"),
        (PROTEIN, "MK1", "letter 3 is not a protein letter, got '1'"),
        (DNA, "ACGé", "letter 4 is not a dna letter, got 'é'"),
        (DNA, "ATCU", "both T and U"),
        (RNA, "AUct", "both U and T"),
    ],
)
def test_what_is_no_letter_is_refused(alphabet, sequence, message):
    with pytest.raises(ConfigError, match=message):
        alphabet.clean(sequence)


@pytest.mark.parametrize(("alphabet", "letter"), [(DNA, "N"), (DNA, "r"), (PROTEIN, "B")])
def test_strict_takes_letters_of_the_alphabet_only(alphabet, letter):
    with pytest.raises(ConfigError, match=f"letter 4 must be .* got the ambiguous '{letter}'"):
        alphabet.clean("ACG" + letter, strict=True)
    with pytest.raises(ConfigError, match="row 3: letter 4"):
        alphabet.clean("ACG" + letter, strict=True, location="row 3")


@pytest.mark.parametrize(
    ("sequence", "alphabet"),
    [
        ("ACGTNNacgt", DNA),
        ("ACGRACGTACGTAC", DNA),
        ("AUCG", RNA),
        ("MKTAYIAKQR", PROTEIN),
        ("MKT", PROTEIN),
        ("ACG\nT", DNA),
    ],
)
def test_what_a_sequence_looks_like(sequence, alphabet):
    assert guess_alphabet(sequence) is alphabet
