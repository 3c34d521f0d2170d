import pickle
from itertools import product

import numpy as np
import pytest
from Bio.Seq import reverse_complement, reverse_complement_rna
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA, PROTEIN, RNA
from narrowcast.workloads.genomics.sequences.tokenizers import (
    Tokenizer,
    make_tokenizer,
)


@st.composite
def tokenizers(draw):
    alphabet = draw(st.sampled_from([DNA, RNA, PROTEIN]))
    if draw(st.booleans()):
        return Tokenizer(alphabet)
    k = draw(st.integers(1, 2 if alphabet is PROTEIN else 5))
    return Tokenizer(alphabet, k, draw(st.integers(0, k - 1)))


def letters_of(alphabet):
    every = alphabet.letters + alphabet.ambiguous + alphabet.unknown + alphabet.stop
    return every + every.lower() + " \n"


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        (Tokenizer(DNA, 3, 1), 77),
        (Tokenizer(RNA, 3, 1), 75),
        (Tokenizer(PROTEIN, 2, 1), 429),
        (Tokenizer(DNA, 6, 1), 4109),
        (Tokenizer(DNA), 13),
        (Tokenizer(RNA), 11),
        (Tokenizer(PROTEIN), 29),
    ],
)
def test_vocabularies_have_the_sizes_of_the_specification(tokenizer, size):
    assert tokenizer.vocab_size == size
    assert tokenizer.tokens[:7] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]")


def test_kmers_stand_in_product_order_before_single_letters():
    tokens = Tokenizer(DNA, 3, 1).tokens
    assert tokens[7:9] == ("[N]", "[RC]")
    assert list(tokens[9:73]) == ["".join(each) for each in product("ATCG", repeat=3)]
    assert tokens[73:] == tuple("ATCG")
    assert Tokenizer(PROTEIN, 2, 1).tokens[7:10] == ("[X]", "[STOP]", "AA")


@given(tokenizer=tokenizers(), data=st.data())
def test_decoding_gives_back_the_cleaned_sequence(tokenizer, data):
    text = data.draw(st.text(letters_of(tokenizer.alphabet), max_size=60))
    if {"T", "U"} <= set(text.upper()) and tokenizer.alphabet is not PROTEIN:
        text = text.replace("U", "").replace("u", "")
    ids = tokenizer.encode(text)
    cleaned = tokenizer.alphabet.clean(text)
    assert tokenizer.decode(ids) == cleaned
    assert tokenizer.decode(np.concatenate(([2], ids, [3]))) == cleaned  # [CLS] and [SEP]


@given(tokenizer=tokenizers(), data=st.data())
def test_every_token_is_what_stands_in_its_span(tokenizer, data):
    alphabet = tokenizer.alphabet
    text = data.draw(st.text(alphabet.letters + alphabet.unknown + alphabet.stop, max_size=60))
    ids = tokenizer.encode(text)
    starts, ends = tokenizer.token_spans(ids)
    named = {"[N]": "N", "[X]": "X", "[UNK]": "N", "[STOP]": "*"}
    found = [named.get(token, token) for token in np.array(tokenizer.tokens)[ids]]
    assert found == [text[a:b] for a, b in zip(starts, ends, strict=True)]
    covered = np.zeros(len(text), dtype=bool)
    for a, b in zip(starts, ends, strict=True):
        covered[a:b] = True
    assert covered.all()


@given(k=st.integers(2, 6), data=st.data())
def test_kmers_lie_a_stride_apart(k, data):
    overlap = data.draw(st.integers(0, k - 1))
    tokenizer = Tokenizer(DNA, k, overlap)
    text = data.draw(st.text("ATCG", min_size=k, max_size=50))
    expected, at = [], 0
    while at + k <= len(text):
        expected.append(text[at : at + k])
        at += k - overlap
    tail = text[at - (k - overlap) + k :]
    assert [tokenizer.tokens[i] for i in tokenizer.encode(text)] == expected + list(tail)


def test_repeated_letters_of_the_tail_are_kept():
    tokenizer = Tokenizer(DNA, 4, 0)
    assert [tokenizer.tokens[i] for i in tokenizer.encode("ATCGAAA")] == ["ATCG", "A", "A", "A"]


def test_specials_lie_between_letters():
    tokenizer = Tokenizer(DNA, 3, 1)
    starts, ends = tokenizer.token_spans(np.concatenate(([2], tokenizer.encode("ATCGA"), [3])))
    assert list(zip(starts, ends, strict=True)) == [(0, 0), (0, 3), (2, 5), (5, 5)]


@given(text=st.text("ACGTN", max_size=40))
def test_one_letter_tokens_are_complemented_by_ids(text):
    tokenizer = Tokenizer(DNA)
    other = tokenizer.complement[tokenizer.encode(text)[::-1]]
    assert tokenizer.decode(other) == reverse_complement(text)


@given(text=st.text("ACGU", max_size=41), k=st.integers(1, 4), data=st.data())
def test_kmers_that_fill_a_sequence_are_complemented_by_ids(text, k, data):
    overlap = data.draw(st.integers(0, k - 1))
    text = text[: len(text) - (len(text) - overlap) % (k - overlap)]
    tokenizer = Tokenizer(RNA, k, overlap)
    if len(text) < k:
        return
    other = tokenizer.complement[tokenizer.encode(text)[::-1]]
    np.testing.assert_array_equal(other, tokenizer.encode(reverse_complement_rna(text)))


@pytest.mark.parametrize("tokenizer", [Tokenizer(DNA), Tokenizer(RNA, 3, 1), Tokenizer(DNA, 3, 1)])
def test_the_complement_of_the_complement_is_every_token_itself(tokenizer):
    ids = np.arange(tokenizer.vocab_size)
    np.testing.assert_array_equal(tokenizer.complement[tokenizer.complement], ids)
    assert Tokenizer(PROTEIN).complement is None


@given(tokenizer=tokenizers(), data=st.data())
def test_whatever_a_model_writes_can_be_decoded(tokenizer, data):
    ids = np.array(data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)), int)
    text = tokenizer.decode(ids)
    starts, ends = tokenizer.token_spans(ids)
    assert tokenizer.alphabet.clean(text) == text
    assert len(ends) == 0 or ends[-1] == len(text)
    assert (starts <= ends).all()


@pytest.mark.parametrize(
    ("k", "overlap", "message"),
    [
        (0, 0, "k must be at least 1"),
        (3, 3, "overlap between 0 and k - 1"),
        (11, 0, "Write a smaller k"),
    ],
)
def test_kmers_that_cannot_be_are_refused(k, overlap, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer(DNA, k, overlap)


def test_ids_of_another_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="vocabulary size of 13"):
        Tokenizer(DNA).decode(np.array([13]))


def test_tokenizers_are_values_that_workers_can_be_sent():
    tokenizer = make_tokenizer("kmer", DNA, 3, 1)
    ids = tokenizer.encode("ATCGN")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again == tokenizer == Tokenizer(DNA, 3, 1)
    assert hash(again) == hash(tokenizer)
    np.testing.assert_array_equal(again.encode("ATCGN"), ids)
    assert make_tokenizer("byte", RNA, 3, 1) == Tokenizer(RNA)
