import gzip
import subprocess
import sys

import pytest
from Bio import SeqIO
from Bio.Seq import Seq
from Bio.SeqFeature import CompoundLocation, FeatureLocation, SeqFeature
from Bio.SeqRecord import SeqRecord

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.genomics.sequences.operations import reverse_complement
from narrowcast.workloads.genomics.sequences.readers.gff import read_features
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import Part


def extract(sequence, parts):
    """Return what parts of a sequence spell, each on its strand."""
    pieces = [(sequence[part.start : part.end], part.strand) for part in parts]
    return "".join(reverse_complement(text) if strand < 0 else text for text, strand in pieces)


@pytest.fixture
def circle(tmp_path):
    """A circular genome of 60 letters with a gene across its origin, as biopython writes it."""
    gene = CompoundLocation([FeatureLocation(54, 60, 1), FeatureLocation(0, 9, 1)])
    spliced = CompoundLocation([FeatureLocation(40, 46, -1), FeatureLocation(20, 26, -1)])
    record = SeqRecord(
        Seq("ACGTTGCAAC" * 6),
        id="C1.1",
        name="C1",
        description="a circle",
        annotations={"molecule_type": "DNA", "topology": "circular", "organism": "Testus"},
        features=[
            SeqFeature(gene, type="gene", qualifiers={"gene": ["abc"]}),
            SeqFeature(spliced, type="CDS"),
        ],
    )
    path = tmp_path / "circle.gb"
    SeqIO.write([record], path, "genbank")
    return path


def test_compound_locations_keep_the_order_in_which_they_are_read(circle):
    (record,) = read_records(circle)
    gene, cds = record.features
    assert (record.name, record.fields["circular"]) == ("C1.1", True)
    assert (record.fields["description"], record.fields["organism"]) == ("a circle", "Testus")
    assert gene.parts == (Part(54, 60, 1), Part(0, 9, 1))
    assert cds.parts == (Part(40, 46, -1), Part(20, 26, -1))
    assert (gene.kind, gene.record, gene.qualifiers["gene"]) == ("gene", "C1.1", ("abc",))
    assert list(read_features(circle)) == [gene, cds]
    parsed = SeqIO.read(circle, "genbank")
    for feature, theirs in zip(record.features, parsed.features, strict=True):
        assert extract(record.sequence, feature.parts) == str(theirs.extract(parsed.seq))


def test_a_real_genome_has_biopythons_features_and_its_own_translations(shared):
    path = shared("genomes") / "GCF_000243915.1_leptospira.gbk.gz"
    translated = 0
    with gzip.open(path, "rt") as file:
        for record, theirs in zip(read_records(path), SeqIO.parse(file, "genbank"), strict=True):
            assert (record.name, record.sequence) == (theirs.id, str(theirs.seq))
            for feature, their in zip(record.features, theirs.features, strict=True):
                assert feature.kind == their.type
                spans = [(int(p.start), int(p.end), p.strand) for p in their.location.parts]
                assert [tuple(part) for part in feature.parts] == spans
                if "translation" in feature.qualifiers and "codon_start" in feature.qualifiers:
                    begin = int(feature.qualifiers["codon_start"][0]) - 1
                    code = int(feature.qualifiers["transl_table"][0])
                    letters = extract(record.sequence, feature.parts)[begin:]
                    # The first amino acid is M whatever its codon; partial genes may begin within.
                    protein = Seq(letters[: len(letters) // 3 * 3]).translate(code, to_stop=True)
                    assert protein[1:] == feature.qualifiers["translation"][0][1:]
                    translated += 1
    assert translated > 3000


def test_brca1_is_spliced_from_its_exons(shared):
    (record,) = read_records(shared("brca1_sge") / "NG_005905.2.gb.gz")
    spliced = [f for f in record.features if f.kind == "CDS" and f.qualifiers["gene"] == ("BRCA1",)]
    assert spliced
    for feature in spliced:
        protein = Seq(extract(record.sequence, feature.parts)).translate(to_stop=True)
        assert protein == feature.qualifiers["translation"][0]


@pytest.mark.parametrize("share", [0.05, 0.4, 0.6, 0.8, 0.99])
def test_a_file_that_is_cut_off_is_refused(circle, tmp_path, share):
    whole = circle.read_bytes()
    path = tmp_path / "cut.gb"
    path.write_bytes(whole[: int(share * (len(whole) - 3))])
    with pytest.raises(ConfigError, match=r"cut.gb, record 1.*copy it again"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("join(55..60,1..9)", "join(x..60,1..9)", "Could not parse feature location"),
        ("60 bp", "61 bp", "Expected sequence length 61, found 60"),
        ("acgttgcaac", "acgt!gcaac", r"record 1: letter 5 is not a protein letter, got '!'"),
    ],
)
def test_what_biopython_only_warns_of_is_refused(circle, old, new, message):
    text = circle.read_text()
    assert old in text
    circle.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        list(read_records(circle))


def test_a_record_without_letters_is_refused(circle):
    text = circle.read_text()
    circle.write_text(text[: text.index("ORIGIN")] + "CONTIG      join(AC1.1:1..60)\n//\n")
    with pytest.raises(ConfigError, match="record 1 has no sequence"):
        list(read_records(circle))


def test_parts_on_other_records_are_left_out(circle):
    text = circle.read_text().replace("join(55..60,1..9)", "join(J00194.1:100..202,1..9)")
    circle.write_text(text)
    (record,) = read_records(circle)
    assert record.features[0].parts == (Part(0, 9, 1),)


def test_without_biopython_the_message_says_what_to_install(circle, monkeypatch):
    monkeypatch.setitem(sys.modules, "Bio", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'narrowcast\[genomics\]'"):
        list(read_records(circle))


def test_the_readers_import_neither_biopython_nor_torch():
    code = (
        "import sys, narrowcast.workloads.genomics.sequences.variants, "
        "narrowcast.workloads.genomics.sequences.labels; "
        "sys.exit(bool({'Bio', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
