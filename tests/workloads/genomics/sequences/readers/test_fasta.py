import gzip
import io
import tracemalloc

import pytest
from Bio import SeqIO
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA, PROTEIN, RNA
from narrowcast.workloads.genomics.sequences.readers.reading import read_records


def pairs(path, **more):
    return [(record.name, record.sequence) for record in read_records(path, **more)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["a.fa", "a.fa.gz", "a.csv"])
def test_gzip_is_known_by_content_and_not_by_name(write, packed, name):
    path = write(">a one\nACGT\n", name, packed=packed)
    (record,) = read_records(path)
    assert (record.name, record.sequence, record.number, record.file) == ("a", "ACGT", 1, path)
    assert record.fields == {"description": "one"}


def test_wrapped_crlf_lower_case_blank_lines_and_empty_records(write):
    text = "\r\n>a\r\nAC\r\n\r\ngt\r\n>empty\r\n>c\tsaid\r\nNN AC\r\n"
    path = write("\ufeff" + text)
    assert pairs(path) == [("a", "ACGT"), ("empty", ""), ("c", "NNAC")]


def test_several_members_of_gzip_are_one_file(write):
    content = gzip.compress(b">a\nAC\n") + gzip.compress(b"GT\n>b\nTT\n")
    assert pairs(write(content)) == [("a", "ACGT"), ("b", "TT")]


_NAMES = st.text("abcXYZ019|._", min_size=1, max_size=8)


@settings(max_examples=50)
@given(
    records=st.lists(
        st.tuples(_NAMES, st.text("ACGTNacgtn", max_size=30)),
        min_size=1,
        unique_by=lambda record: record[0],
    ),
    width=st.integers(1, 12),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_fasta_is_read_as_biopython_reads_it(tmp_path_factory, records, width, end):
    lines = []
    for name, sequence in records:
        lines += [f">{name} about {name}"]
        lines += [sequence[at : at + width] for at in range(0, len(sequence), width)]
    text = end.join([*lines, ""])
    path = tmp_path_factory.mktemp("fasta") / "x"
    path.write_bytes(text.encode())
    expected = [
        (each.id, str(each.seq).upper()) for each in SeqIO.parse(io.StringIO(text), "fasta")
    ]
    assert pairs(path, alphabet=DNA) == expected


def test_a_fasta_needs_memory_for_a_record_and_not_for_the_file(tmp_path):
    path, sequence = tmp_path / "big.fa", b"ACGT" * 5000
    with path.open("wb") as file:
        for number in range(500):
            file.write(b">%d\n%s\n" % (number, sequence))
    tracemalloc.start()
    letters = sum(len(record.sequence) for record in read_records(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert letters == 500 * len(sequence)
    # A block of the file, and a record as its line, its bytes and its cleaned forms.
    assert peak < 2**20 < letters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (">a\nACGT\n>b\nAC!T\n", "file, record 2: letter 3 is not a dna letter, got '!'"),
        (
            ">a\nACGT\n>b\nGG\n>a\nTT\n",
            "record 3 has the name of an earlier record, got 'a'",
        ),
        (
            ">a\nACGT\n>b\nMKVLEW\n",
            "record 2 reads as protein, but dna is the alphabet of",
        ),
        (">a\nACGT\n>b\nAUG\n", "record 2 reads as rna, but dna"),
        (">a\nACTU\n", "record 1: the sequence has both T and U"),
        (">a\rACGT\r>b\rAC\r", "record 1: lines end with CR only"),
        ("\n\n", "has no r"),
        (b">\xff\xfe\nAC\n", "record 1 is not UTF-8"),
        (b"BZh91AY", "compressed with bzip2"),
        (b"PK\x03\x04", "compressed with zip"),
        ("##gff-version 3\n", "has features but no sequences"),
        ("##fileformat=VCFv4.2\n", "has variants but no sequences"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_record(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message):
        list(read_records(path))


def test_genes_are_not_read_as_proteins(write):
    path = write(">a\nMKVLE\n>b\n" + "ACGTN" * 4 + "\n")
    with pytest.raises(ConfigError, match="record 2 reads as dna, but protein was requested"):
        list(read_records(path, alphabet=PROTEIN))


def test_short_or_simple_peptides_of_the_letters_of_bases_are_proteins(write):
    path = write(">a\nACGT\n>silk\n" + "GAGAGS" * 10 + "\n")
    assert [letters for _, letters in pairs(path, alphabet=PROTEIN)] == ["ACGT", "GAGAGS" * 10]


@pytest.mark.parametrize(("alphabet", "sequence"), [(DNA, "ATTN"), (RNA, "AUUN")])
def test_a_named_alphabet_takes_its_sister(write, alphabet, sequence):
    path = write(">a\nATTR\n>b\nAUUR\n")
    assert [letters for _, letters in pairs(path, alphabet=alphabet)] == [sequence, sequence]


def test_ambiguous_letters_become_n_or_raise(write):
    path = write(">a\nACGT\n>b\nACRYN\n")
    assert [record.sequence for record in read_records(path, alphabet=DNA)] == ["ACGT", "ACNNN"]
    with pytest.raises(ConfigError, match=r"record 2: letter 3 must be .* got the ambiguous 'R'"):
        list(read_records(path, alphabet=DNA, strict=True))


def test_a_truncated_gzip_is_refused_at_the_record_it_ends_in(tmp_path, shared):
    whole = (shared("genomes") / "NC_001416_lambda.fa.gz").read_bytes()
    path = tmp_path / "cut.fa.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"record 1 cannot be decompressed.*copy it again"):
        list(read_records(path))


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_records(tmp_path / "none.fa"))
    with pytest.raises(ConfigError, match="it is a folder"):
        list(read_records(tmp_path))


@pytest.mark.parametrize(
    "name", ["NC_001416_lambda.fa.gz", "NC_001422_phix174.fna", "NC_008253_ecoli536.fna.gz"]
)
def test_real_genomes_are_read_as_biopython_reads_them(shared, name):
    path = shared("genomes") / name
    with gzip.open(path, "rt") if name.endswith(".gz") else path.open() as file:
        expected = [(each.id, str(each.seq)) for each in SeqIO.parse(file, "fasta")]
    assert pairs(path) == expected


FASTQ = "@r1 first\nACGT\n+\nII@I\n@r2\nAC\nGT\n+r2\n@I\nII\n@r2\n\n+\n\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_fastq_wrapped_or_not_with_qualities_that_look_like_names(write, end):
    records = list(read_records(write(FASTQ.replace("\n", end), packed=end == "\n")))
    found = [(each.name, each.sequence, each.fields["quality"]) for each in records]
    assert found == [("r1", "ACGT", "II@I"), ("r2", "ACGT", "@III"), ("r2", "", "")]
    assert records[0].fields["description"] == "first"


@settings(max_examples=50)
@given(
    reads=st.lists(
        st.text("ACGTN", max_size=20).flatmap(
            lambda s: st.tuples(
                st.just(s),
                st.text([chr(c) for c in range(33, 127)], min_size=len(s), max_size=len(s)),
            )
        ),
        min_size=1,
    )
)
def test_fastq_is_read_as_biopython_reads_it(tmp_path_factory, reads):
    text = "".join(f"@r{n}\n{s}\n+\n{q}\n" for n, (s, q) in enumerate(reads))
    path = tmp_path_factory.mktemp("fastq") / "x"
    path.write_text(text)
    expected = [
        (each.id, str(each.seq), each.letter_annotations["phred_quality"])
        for each in SeqIO.parse(io.StringIO(text), "fastq")
    ]
    found = [
        (each.name, each.sequence, [ord(c) - 33 for c in each.fields["quality"]])
        for each in read_records(path, alphabet=DNA)
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@a\nAC\n+\nII\n@b\nACGT\n+\nII\n", "record 2 is truncated: 2 qualities for 4 letters"),
        ("@a\nAC\n+\nII\n@b\nACGT\n", "record 2 is truncated: it has no"),
        ("@a\nACGT\n+\nIIIII\n", "record 1 must have one quality per letter, got 5 for 4"),
        ("@a\nACGT\n+b\nIIII\n", "line has the name of another record"),
        ("@a\nAC\n+\nII\nII\n", "record 2 must begin with @, got 'II'"),
        ("@a\nAC\n+\nI\x01\n", "record 1: qualities must be characters"),
    ],
)
def test_damaged_fastq_is_refused_with_file_and_record(write, text, message):
    with pytest.raises(ConfigError, match=message):
        list(read_records(write(text)))
