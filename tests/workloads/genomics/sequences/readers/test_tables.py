import csv
import gzip
import json

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.vcf import read_variants

ROWS = [{"sequence": "ACGT", "label": "1"}, {"sequence": "ggnn", "label": "0"}]
TABLES = {
    "csv": "sequence,label\nACGT,1\nggnn,0\n",
    "csv, quoted, crlf, blanks": '"sequence", label\r\n"ACGT", 1\r\n\r\nggnn, 0 \r\n',
    "tsv": "sequence\tlabel\nACGT\t1\nggnn\t0\n",
    "json": json.dumps(ROWS, indent=1),
    "jsonl": "\n".join(json.dumps(row) for row in ROWS) + "\n\n",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_all_kinds_are_one(write, kind, packed):
    records = list(read_records(write(TABLES[kind], packed=packed)))
    assert [record.sequence for record in records] == ["ACGT", "GGNN"]
    assert [record.fields for record in records] == [{"label": "1"}, {"label": "0"}]
    assert [record.number for record in records] == [1, 2]


def test_values_of_json_keep_their_types(write):
    path = write('{"sequence": "AC", "labels": [0, 1], "score": 0.5, "said": null}\n')
    (record,) = read_records(path)
    assert record.fields == {"labels": [0, 1], "score": 0.5, "said": None}


def test_other_columns_may_hold_the_sequence_and_its_name(write):
    path = write("id,ref,alt\nv1,acgt,acrt\n")
    (record,) = read_records(path, column="alt", name="id", alphabet=DNA)
    assert (record.name, record.sequence, record.fields["ref"]) == ("v1", "ACNT", "acgt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq,label\nAC,1\n", "record 1 has no column sequence, got seq, label"),
        ('{"sequence": "AC"}\n{"label": 1}\n', "record 2 has no column sequence, got label"),
        ("sequence,label\nAC,1\nAC\n", "record 2 must have 2 fields, got 1"),
        ("sequence,label\nAC,1\nA!,1\n", "record 2: letter 2 is not a dna letter, got '!'"),
        ("sequence,sequence\nAC,1\n", "column sequence occurs twice"),
        ("sequence,\nAC,1\n", "a column has no name"),
        ("sequence;label\nAC;1\n", "';' as its separator"),
        ("sequence,label\n", "has no records"),
        ('[{"sequence": 3}]', "record 1: sequence must be text, got 3"),
        ('[{"sequence": "AC"}, 3]', "record 2 must be an object"),
        ('[{"sequence": "AC"', "is not JSON"),
        ('{"sequence": "AC"}\n{"sequ\n', "record 2 is not JSON"),
        ('sequence,label\nAC,"1\n', "record 1"),
        (b"sequence,label\nAC,\xff\n", "record 1 is not UTF-8"),
        (b"sequence,label\rAC,1\r", "new-line character"),
        (b"a\0b,c\n", "is not text"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_record(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message):
        list(read_records(path))


def test_a_table_of_variants_must_have_their_columns(write):
    path = write("chrom,pos\n17,41276135\n")
    with pytest.raises(ConfigError, match="record 1 has no column ref, got chrom, pos"):
        list(read_variants(path))


def test_fields_longer_than_the_usual_limit_of_csv(write):
    path = write("sequence,label\n" + "ACGT" * 100_000 + ",1\n")
    assert len(next(read_records(path)).sequence) == 400_000


def test_real_tables_are_read_as_csv_reads_them(shared):
    path = shared("gue") / "prom_core_tata/test.csv.gz"
    with gzip.open(path, "rt") as file:
        expected = [(row["sequence"], row["label"]) for row in csv.DictReader(file)]
    assert [(r.sequence, r.fields["label"]) for r in read_records(path)] == expected
    assert len(expected) == 613


def test_splice_junctions_with_their_ambiguous_letters(shared):
    records = list(read_records(shared("splice_uci") / "splice.csv", name="instance_name"))
    assert len(records) == 3190
    assert {len(record.sequence) for record in records} == {60}
    assert records[0].name == "ATRINS-DONOR-521"
    assert 0 < sum(record.sequence.count("N") for record in records) < 200
