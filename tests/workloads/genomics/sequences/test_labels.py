from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.labels import (
    IGNORE,
    base_labels,
    base_values,
    letter_labels,
    reversed_labels,
    token_labels,
)
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Feature, Part, Record
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer


def feature(kind, *parts):
    return Feature(kind=kind, parts=tuple(Part(*part) for part in parts), record="x")


GENES = [
    feature("gene", (1, 4, 1)),
    feature("gene", (8, 10, -1), (5, 7, -1)),
    feature("exon", (2, 3, 1)),
]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ({"gene": 1}, [0, 1, 1, 1, 0, 1, 1, 0, 1, 1]),
        ({"gene+": 1, "gene-": 2}, [0, 1, 1, 1, 0, 2, 2, 0, 2, 2]),
        ({"gene-": 1}, [0, 0, 0, 0, 0, 1, 1, 0, 1, 1]),
        ({"gene": 1, "exon": 2}, [0, 1, 2, 1, 0, 1, 1, 0, 1, 1]),
        ({"exon": 2, "gene": 1}, [0, 1, 1, 1, 0, 1, 1, 0, 1, 1]),
        ({"intron": 1}, [0] * 10),
    ],
)
def test_each_base_has_the_class_of_the_feature_it_lies_in(classes, expected):
    assert base_labels(10, GENES, classes).tolist() == expected


def test_a_feature_across_the_origin_as_genbank_and_as_gff_write_it():
    split = [feature("gene", (8, 10, 1), (0, 2, 1))]
    beyond = [feature("gene", (8, 12, 1))]
    expected = [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert base_labels(10, split, {"gene": 1}).tolist() == expected
    assert base_labels(10, beyond, {"gene": 1}, circular=True).tolist() == expected
    with pytest.raises(ConfigError, match=r"f.gb, record 2: gene at 9 to 12 is outside its 10"):
        base_labels(10, beyond, {"gene": 1}, location="f.gb, record 2")


def test_labels_of_the_other_strand_exchange_strands():
    classes = {"gene+": 1, "gene-": 2, "exon": 3}
    labels = np.array([0, 1, 1, 2, 3])
    assert reversed_labels(labels, classes).tolist() == [3, 1, 2, 2, 0]
    twice = reversed_labels(reversed_labels(labels, classes), classes)
    np.testing.assert_array_equal(twice, labels)


@given(labels=st.lists(st.integers(0, 3), max_size=40), k=st.integers(1, 5), data=st.data())
def test_labels_on_tokens_are_those_of_their_own_letters(labels, k, data):
    tokenizer = Tokenizer(DNA, k, data.draw(st.integers(0, k - 1)))
    letters = data.draw(st.text("ACGTN", min_size=len(labels), max_size=len(labels)))
    ids = np.concatenate(([tokenizer.pad_id], tokenizer.encode(letters)))
    spans = tokenizer.token_spans(ids)
    laid = token_labels(np.array(labels, dtype=np.int64), spans)
    assert laid[0] == IGNORE
    for label, start, end in list(zip(laid, *spans, strict=True))[1:]:
        own = labels[start:end]
        assert label == own[(len(own) - 1) // 2]


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_labels_of_single_letters_come_back(labels):
    labels = np.array(labels)
    spans = np.arange(len(labels)), np.arange(len(labels)) + 1
    np.testing.assert_array_equal(token_labels(labels, spans), labels)
    np.testing.assert_array_equal(base_values(labels, spans, len(labels)), labels)


@given(length=st.integers(1, 40), k=st.integers(1, 5), data=st.data())
def test_a_base_takes_the_value_of_the_nearest_token(length, k, data):
    overlap = data.draw(st.integers(0, k - 1))
    tokenizer = Tokenizer(DNA, k, overlap)
    starts, ends = tokenizer.token_spans(tokenizer.encode("A" * length))
    found = base_values(np.arange(len(starts)), (starts, ends), length)
    middles = (starts + ends - 1) / 2
    expected = [int(np.argmin(np.abs(middles - base))) for base in range(length)]
    assert found.tolist() == expected


def test_too_few_labels_are_refused():
    with pytest.raises(ConfigError, match="tokens reach letter 5, got 4 labels"):
        token_labels(np.zeros(4, dtype=np.int64), (np.arange(5), np.arange(5) + 1))


def record(**fields):
    return Record(name="a", sequence="ACGT", number=3, file=Path("t.csv"), fields=fields)


@pytest.mark.parametrize("value", ["OGGO", "O G G O", ["O", "G", "G", "O"], [0, 1, 1, 0], "0110"])
def test_labels_of_letters_are_texts_or_lists(value):
    assert letter_labels(record(labels=value), "labels", ["O", "G"]).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("value", ["OG-O", "O G - O", ["O", "G", None, "O"], [0, 1, "-", 0]])
def test_letters_of_unknown_class_are_ignored(value):
    classes = ["O", "G"]
    assert letter_labels(record(labels=value), "labels", classes).tolist() == [0, 1, -100, 0]


def test_a_class_may_be_called_as_unknown_letters_are():
    assert letter_labels(record(labels="-GG-"), "labels", ["-", "G"]).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("OGG", "t.csv, record 3: labels must .* 4 letters, got 3"),
        (3, "each of 4 letters, got no list"),
        ("OGGX", "t.csv, record 3: labels must be one of O, G, .* got 'X'"),
        ([0, 1, 2, 0], "labels must be one of O, G, .* got 2"),
        ([0, True, 0, 0], "got True"),
    ],
)
def test_labels_that_do_not_fit_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        letter_labels(record(labels=value), "labels", ["O", "G"])


def test_genes_of_a_real_genome_are_where_biopython_finds_them(shared):
    import gzip

    from Bio import SeqIO

    path = shared("genomes") / "GCF_000243915.1_leptospira.gbk.gz"
    with gzip.open(path, "rt") as file:
        largest = max(SeqIO.parse(file, "genbank"), key=len)
    record = next(each for each in read_records(path) if each.name == largest.id)
    labels = base_labels(len(record.sequence), record.features, {"gene+": 1, "gene-": 2})
    last = np.zeros(len(largest), dtype=np.int64)
    for strand, number in ((1, 1), (-1, 2)):
        for gene in (each for each in largest.features if each.type == "gene"):
            if gene.location.strand == strand:
                last[list(gene.location)] = number
    np.testing.assert_array_equal(labels, last)
    assert 0.5 < np.mean(labels > 0) < 1
