"""Rows out of files, and what is wrong with a file said by its record."""

import json

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data.reading import read_rows
from narrowcast.workloads.genomics.settings import GenomicData, Objective


@pytest.fixture
def read(tmp_path):
    """Write files into a folder, and read the first as a task does."""

    def rows(task, files, *, objective=None, **data):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        first = str(tmp_path / next(iter(files)))
        for key in ("reference", "features"):
            if key in data:
                data[key] = str(tmp_path / data[key])
        settings = GenomicData(path=first, **data)
        return read_rows(first, settings, Objective(task=task, **(objective or {})))

    return rows


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_table_has_a_class_a_row(read):
    (one, two) = read("domain_adaptation", {"t.csv": "sequence,label\nacgt,x\nGG, y \n"})
    assert [(row.sequence, row.label) for row in (one, two)] == [("ACGT", "x"), ("GG", "y")]
    assert two.location.endswith("t.csv, record 2")


def test_labels_of_json_are_numbers_words_or_lists_of_them(read):
    labels = [1, 1.0, True, "x", 0.5, ["a", "b"], []]
    text = jsonl(*[{"sequence": "ACGT", "label": label} for label in labels])
    rows = read("domain_adaptation", {"t.jsonl": text}, objective={"target": "labels"})
    assert [row.label for row in rows] == ["1", "1", "1", "x", "0.5", "a;b", ""]


@pytest.mark.parametrize("label", ["NaN", "Infinity", '{"a": 1}', "[NaN]"])
def test_a_label_that_is_none_is_refused_by_its_record(read, label):
    good = '{"sequence": "ACGT", "label": 1}\n'
    text = f'{good}{{"sequence": "ACGT", "label": {label}}}\n'
    with pytest.raises(ConfigError, match=r"t\.jsonl, record 2: the label must be text"):
        read("variant_effect", {"t.jsonl": text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv"),
        ("sequence,label\n", r"t\.csv has no records"),
        ("sequence,class\nACGT,x\n", r"record 1 has no label 'label', got class. Name"),
        ("sequence,label\nACGT,x\nACGT,\n", r"record 2: the label 'label' is empty. Remove"),
        ("text,label\nACGT,x\n", r"record 1 has no column sequence, got text, label"),
        ("sequence,label\n,x\n", r"record 1 has an empty sequence"),
        ("sequence,label\nACGT,x\nACGQ,x\n", r"record 2: letter 4 is not a dna letter, got 'Q'"),
        (
            "sequence,alternative,label\nACGT,AC!T,x\n",
            r"record 1: letter 3 is not a dna letter, got '!'",
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_said_by_its_record(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read("variant_effect", {"t.csv": text})


def test_a_file_that_is_not_there_is_refused(read, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv cannot be read"):
        read_rows(
            str(tmp_path / "nowhere.csv"), GenomicData(path="x"), Objective(task="generation")
        )


GENOME = ">chr1 x\nAACCGGTTAA\nCCGGTT\n"
TABLE = "chrom,pos,ref,alt,label\n"


def test_variants_lie_in_the_middle_of_their_reference(read):
    rows = read(
        "variant_effect",
        {"v.csv": f"{TABLE}1,7,T,G,bad\nchr1,5,GG,G,good\n", "g.fa": GENOME},
        reference="g.fa",
        max_length=6,
    )
    assert [(row.sequence, row.alternative, row.label) for row in rows] == [
        ("GGTTAA", "GGGTAA", "bad"),
        ("CCGGTT", "CCGTTA", "good"),
    ]
    assert rows[0].name == "1:7T>G"


def test_the_classes_of_a_vcf_are_in_its_info(read):
    vcf = (
        "##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
        "chr1\t7\t.\tT\tG\t.\t.\tCLNSIG=Benign;AF=0.1\n"
    )
    files = {"v.vcf": vcf, "g.fa": GENOME}
    (row,) = read("variant_effect", files, reference="g.fa", label="CLNSIG", max_length=4)
    assert row.label == "Benign"
    with pytest.raises(ConfigError, match=r"v\.vcf, record 1 has no label 'label'.*CLNSIG, AF"):
        read("variant_effect", files, reference="g.fa")
    files["v.vcf"] = vcf.replace("Benign", ".")  # how VCF writes that there is none
    with pytest.raises(ConfigError, match=r"record 1: the label 'CLNSIG' is empty"):
        read("variant_effect", files, reference="g.fa", label="CLNSIG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chr1,7,A,G,x", r"v\.csv, record 1: the reference of chr1:7 is A, but .*g\.fa has T"),
        ("chr2,7,T,G,x", r"record 1: chr2:7 is not in .*g\.fa"),
        ("chr1,70,T,G,x", r"record 1: chr1:70 is not in"),
        ("chr1,seven,T,G,x", r"record 1: pos must be a whole number from 1, got 'seven'"),
        ("chr1,7,T,<DEL>,x", r"record 1: the alternative must be a sequence, got '<DEL>'"),
    ],
)
def test_a_variant_that_does_not_fit_its_reference_is_refused(read, line, message):
    files = {"v.csv": f"{TABLE}{line}\n", "g.fa": GENOME}
    with pytest.raises(ConfigError, match=message):
        read("variant_effect", files, reference="g.fa")


GFF = "##gff-version 3\n{name}\tx\tgene\t3\t6\t.\t+\t.\tID=g\n"


def test_features_of_a_gff_are_the_classes_of_letters(read):
    files = {"g.fa": GENOME, "g.gff": GFF.format(name="chr1")}
    (row,) = read("annotation", files, features="g.gff")
    assert row.letters.tolist() == [0, 0, 1, 1, 1, 1] + [0] * 10


def test_a_sequence_that_the_gff_does_not_name_is_refused(read):
    files = {"g.fa": GENOME, "g.gff": GFF.format(name="NC_1")}
    with pytest.raises(ConfigError, match=r"g\.fa, record 1: 'chr1' has no feature in .*on NC_1"):
        read("annotation", files, features="g.gff")


def test_features_beyond_the_end_are_refused(read):
    files = {"g.fa": ">chr1\nACGT\n", "g.gff": GFF.format(name="chr1")}
    with pytest.raises(ConfigError, match=r"g\.fa, record 1: gene at 3 to 6 is outside"):
        read("annotation", files, features="g.gff")


def test_a_genome_without_anything_on_it_is_refused(read):
    with pytest.raises(ConfigError, match=r"record 1 has neither a column 'label' nor features"):
        read("annotation", {"g.fa": GENOME})


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("010", r"t\.csv, record 2: label must .* 4 letters, got 3"),
        ("0102", r"record 2: label must be one of other, gene, .* got '2'"),
    ],
)
def test_classes_of_letters_that_do_not_fit_are_refused(read, label, message):
    text = f"sequence,label\nACGT,01-0\nACGT,{label}\n"
    with pytest.raises(ConfigError, match=message):
        read("annotation", {"t.csv": text}, objective={"labels": ("other", "gene")})


def test_letters_whose_class_nobody_knows_are_left_out(read):
    text = "sequence,label\nACGT,01-0\n"
    (row,) = read("annotation", {"t.csv": text}, objective={"labels": ("other", "gene")})
    assert row.letters.tolist() == [0, 1, -100, 0]


def test_strict_refuses_letters_that_mean_several(read):
    (row,) = read("generation", {"g.fa": ">a\nACGRN\n"})
    assert row.sequence == "ACGNN"
    with pytest.raises(
        ConfigError, match=r"g\.fa, record 1: letter 4 must be .* got the ambiguous 'R'"
    ):
        read("generation", {"g.fa": ">a\nACGRN\n"}, strict=True)


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("Seq,label\nACGT,a\n", "", "got Seq, label. Name the column with data.sequence"),
        (",sequence,label\n0,ACGT,a\n", "", r"to_csv\(…, index=False\)"),
        (
            "chrom,pos,ref,alt,label\n1,2,A,C,a\n",
            "",
            "Variants need their FASTA: write data.reference",
        ),
        ("##fileformat=VCFv4.2\n", "", "refer to with data.reference, or --reference"),
        ("chrom,at,ref,alt,label\n1,2,A,C,a\n", "r.fa", "Name the column with data.position"),
        ("Chr,pos,ref,alt,label\n1,2,A,C,a\n", "r.fa", "Rename the column to chrom"),
        (
            "chrom,pos,ref,alt,label\nNC_1,2,A,C,a\n",
            "r.fa",
            "Use the chromosome names of the FASTA",
        ),
        (">one\nACGT\n", "r.fa", "has sequences but no variants. Give a VCF"),
    ],
)
def test_what_is_missing_is_said_with_what_to_write(tmp_path, text, reference, message):
    (tmp_path / "t").write_text(text)
    (tmp_path / "r.fa").write_text(">chr1\nGAGT\n")
    data = GenomicData(path=str(tmp_path / "t"), reference=reference and str(tmp_path / reference))
    with pytest.raises(ConfigError, match=message):
        read_rows(str(tmp_path / "t"), data, Objective(task="variant_effect"))
