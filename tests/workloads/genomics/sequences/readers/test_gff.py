import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.gff import read_features
from narrowcast.workloads.genomics.sequences.readers.record import Feature, Part

GFF = (
    "##gff-version 3\n# said\n\n"
    "chr1\tx\tgene\t1\t9\t.\t+\t.\tID=g1;Name=a%3Bb;Dbxref=A:1,B:2\n"
    "chr1\tx\tCDS\t4\t9\t0.5\t-\t0\tParent=g1\n"
    "##FASTA\n>chr1\nACGT\n"
)


@pytest.mark.parametrize("packed", [False, True])
def test_gff3_counts_from_1_and_features_from_0(write, packed):
    gene, cds = read_features(write(GFF.replace("\n", "\r\n") if packed else GFF, packed=packed))
    assert gene.parts == (Part(0, 9, 1),)
    assert gene.qualifiers == {"ID": ("g1",), "Name": ("a;b",), "Dbxref": ("A:1", "B:2")}
    assert cds == Feature(
        kind="CDS", parts=(Part(3, 9, -1),), record="chr1", qualifiers={"Parent": ("g1",)}
    )


def test_gtf_has_its_own_attributes(write):
    line = 'chr1\tx\texon\t1\t9\t.\t.\t.\tgene_id "g 1"; tag "a"; tag "b";\n'
    (exon,) = read_features(write(line))
    assert exon.qualifiers == {"gene_id": ("g 1",), "tag": ("a", "b")}
    assert exon.parts[0].strand == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chr1\tx\tgene\t1\t9\t.\t+\t.", "a GFF feature must have 9 tab-separated columns, got 8"),
        (
            "chr1\tx\tgene\t0\t9\t.\t+\t.\tID=a",
            "positions must begin at 1, the smaller first, got 0 to 9",
        ),
        (
            "chr1\tx\tgene\t9\t1\t.\t+\t.\tID=a",
            "positions must begin at 1, the smaller first, got 9 to 1",
        ),
        (
            "chr1\tx\tgene\tone\t9\t.\t+\t.\tID=a",
            "start and end must be whole numbers, got one and 9",
        ),
        ("chr1\tx\tgene\t1\t9\t.\t*\t.\tID=a", "strand must be one of"),
    ],
)
def test_what_is_wrong_is_said_with_file_record_and_line(write, line, message):
    path = write("##gff-version 3\nchr1\tx\tgene\t1\t9\t.\t+\t.\tID=b\n" + line + "\n")
    with pytest.raises(ConfigError, match=rf"file, record 2 \(line 3\): {message}"):
        list(read_features(path))


def test_a_file_without_features_is_refused(write):
    with pytest.raises(ConfigError, match="has no features"):
        list(read_features(write("##gff-version 3\n")))
