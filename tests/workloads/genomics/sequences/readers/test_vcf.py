import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.vcf import (
    Skipped,
    VariantColumns,
    read_variants,
)

HEAD = "##fileformat=VCFv4.2\n##source=x\n"
NAMES = "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO"
VCF = (
    HEAD + NAMES + "\tFORMAT\ts1\n"
    "chr1\t3\trs1\ta\tG,t\t30\tPASS\tAF=0.5;DB\tGT\t0/1\n"
    "chr1\t4\t.\tAC\t.\t.\t.\t.\tGT\t0/0\n"
    "chr1\t5\t.\tA\t<DEL>\t.\t.\t.\tGT\t0/0\n"
)


@pytest.mark.parametrize("packed", [False, True])
def test_alternatives_of_a_record_are_a_variant_each(write, packed):
    variants = list(read_variants(write(VCF, packed=packed)))
    found = [(v.chrom, v.position, v.reference, v.alternative, v.number) for v in variants]
    assert found == [
        ("chr1", 3, "A", "G", 1),
        ("chr1", 3, "A", "T", 1),
        ("chr1", 5, "A", "<DEL>", 3),
    ]
    assert variants[0].fields == {
        "ID": "rs1", "QUAL": "30", "FILTER": "PASS", "FORMAT": "GT", "s1": "0/1",
        "INFO": {"AF": "0.5", "DB": True},
    }  # fmt: skip


def test_records_without_an_alternative_are_counted(write):
    skipped = Skipped()
    list(read_variants(write(VCF), skipped=skipped))
    assert skipped.note.startswith("left out 1 records without an alternative (ALT is .)")
    assert skipped.first.endswith("record 2")


def test_an_alternative_has_its_own_value_of_what_the_header_counts_by_alleles(write):
    head = HEAD + "".join(
        f'##INFO=<ID={key},Number={number},Type=String,Description="x">\n'
        for key, number in (("CLASS", "A"), ("AD", "R"), ("SIG", "."), ("ODD", "A"))
    )
    info = "CLASS=good,bad;AD=9,1,2;SIG=a,b;ODD=1,2,3"
    variants = read_variants(write(head + NAMES + f"\n1\t3\t.\tA\tG,T\t.\t.\t{info}\n"))
    assert [variant.fields["INFO"] for variant in variants] == [
        {"CLASS": "good", "AD": "1", "SIG": "a,b", "ODD": "1,2,3"},
        {"CLASS": "bad", "AD": "2", "SIG": "a,b", "ODD": "1,2,3"},
    ]


def test_tables_name_their_columns(write):
    path = write("chrom,pos_hg19,ref,alt,cadd\n17,41276135,T,G,6.0\n")
    (variant,) = read_variants(path, VariantColumns(position="pos_hg19"))
    assert (variant.chrom, variant.position, variant.fields) == ("17", 41276135, {"cadd": "6.0"})
    with pytest.raises(ConfigError, match="record 1 has no column pos, got chrom, pos_hg19"):
        list(read_variants(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD + NAMES + "\nchr1\t0\t.\tA\tG\t.\t.\t.\n",
            "record 1: POS must be a whole number from 1, got '0'",
        ),
        (
            HEAD + NAMES + "\nchr1\t2\t.\tA1\tG\t.\t.\t.\n",
            "record 1: REF must be letters, got 'A1'",
        ),
        (HEAD + NAMES + "\nchr1\t2\t.\tA\n", "record 1 must have 8 columns, got 4"),
        (HEAD + "chr1\t2\t.\tA\tG\t.\t.\t.\n", "no #CHROM line"),
        (HEAD + NAMES.replace("\t", " ") + "\n", "separated by tabs"),
        (HEAD + NAMES + "\n", "has no variants"),
        (HEAD + NAMES + "\n1\t2\t.\tA\t.\t.\t.\t.\n", "no variants: ALT is . in every record"),
        ("chrom,pos,ref,alt\n1,2,A,.\n", "no variants: alt is . in every record"),
        (
            "chrom,pos,ref,alt\n1,41.0,A,G\n",
            "record 1: pos must be a whole number from 1, got '41.0'",
        ),
        ("chrom,pos,ref,alt\n1,41,A,\n", "record 1: alt is empty"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_record(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message):
        list(read_variants(path))
