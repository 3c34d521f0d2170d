import numpy as np
import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data.preparing import as_examples, examine
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.settings import GenomicData, Objective


def bases(count, seed):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), count))


@pytest.fixture
def table(tmp_path):
    """Write rows of sequence and label to a file, and return its name."""

    def write(name, rows):
        lines = [",".join(row) for row in [("sequence", "label"), *rows]]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    return write


ROWS = [(bases(30, n), "ab"[n % 2]) for n in range(40)]


def classes_of(data, **objective):
    return examine(data, Objective(task="domain_adaptation", **objective), seed=0).classes


def test_what_is_judged_on_is_not_learnt(table):
    data = GenomicData(path=table("a.csv", ROWS), validation=table("b.csv", ROWS[:7]),
                       test=table("c.csv", ROWS[5:9]))  # fmt: skip
    found = examine(data, Objective(task="domain_adaptation"), seed=0)
    assert {part: len(rows) for part, rows in found.parts.items()} == {
        "train": 31, "validation": 7, "test": 4,
    }  # fmt: skip
    assert "left out 9 training sequences that are also held out" in found.notes


def test_records_without_an_alternative_are_noted(tmp_path):
    genome = bases(300, 0)
    (tmp_path / "g.fa").write_text(f">chr1\n{genome}\n")
    lines = [
        f"chr1,{at},{genome[at - 1]},{'.' if at % 4 else genome[at - 1] + 'A'},{'ab'[at % 8 // 4]}"
        for at in range(1, 201)
    ]
    (tmp_path / "v.csv").write_text("\n".join(["chrom,pos,ref,alt,label", *lines]))
    data = GenomicData(path=str(tmp_path / "v.csv"), reference=str(tmp_path / "g.fa"))
    found = examine(data, Objective(task="variant_effect"), seed=0)
    assert sum(map(len, found.parts.values())) == 50
    assert any(
        note.startswith("left out 150 records without an alternative") for note in found.notes
    )


def test_sequences_that_are_all_the_same_are_refused(table):
    rows = [(ROWS[0][0], "ab"[n % 2]) for n in range(40)]
    for words in ({}, {"validation": table("b.csv", rows)}):
        data = GenomicData(path=table("a.csv", rows), **words)
        with pytest.raises(ConfigError, match=r"all \d+ sequences are the same"):
            examine(data, Objective(task="domain_adaptation"), seed=0)


@pytest.mark.parametrize("task", ["generation", "annotation"])
def test_stretches_of_unknown_letters_are_left_out_of_genomes(task, tmp_path):
    (tmp_path / "g.fa").write_text(f">known\n{bases(1000, 0)}\n>gap\n{'N' * 1000}\n")
    (tmp_path / "g.gff").write_text(
        "".join(f"{name}\t.\tgene\t51\t90\t.\t+\t.\tID={name}\n" for name in ("known", "gap"))
    )
    words = {"features": str(tmp_path / "g.gff")} if task == "annotation" else {}
    data = GenomicData(path=str(tmp_path / "g.fa"), max_length=50, **words)
    labels = {"labels": ("none", "gene")} if task == "annotation" else {}
    found = examine(data, Objective(task=task, **labels), seed=0)
    assert {row.name for rows in found.parts.values() for row in rows} == {"known"}
    assert "left out 20 sequences that have only unknown letters (N)" in found.notes


def test_sequences_of_nothing_but_unknown_letters_are_refused(table):
    rows = [("N" * (30 + n), "ab"[n % 2]) for n in range(40)]
    with pytest.raises(ConfigError, match="only the unknown letter N"):
        examine(GenomicData(path=table("a.csv", rows)), Objective(task="domain_adaptation"), seed=0)


def test_sequences_with_several_classes_are_counted(table):
    rows = [*ROWS, *((text, "b") for text, _ in ROWS[:6])]  # three of them were a
    found = examine(GenomicData(path=table("a.csv", rows)), Objective(task="domain_adaptation"),
                    seed=0)  # fmt: skip
    assert [
        note for note in found.notes if note.startswith("3 sequences occur with different classes")
    ]


def test_variants_at_positions_that_are_judged_on_are_counted(tmp_path):
    genome = bases(300, 0)
    (tmp_path / "g.fa").write_text(f">chr1\n{genome}\n")

    def variants(name, chrom, places, turn):
        lines = ["chrom,pos,ref,alt,label"]
        for at in places:
            old = genome[at - 1]
            new = "ACGT"[("ACGT".index(old) + turn) % 4]
            lines.append(f"{chrom},{at},{old},{new},{'ab'[at % 2]}")
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    learnt = variants("a.csv", "1", range(50, 90), 1)
    judged = variants("b.csv", "chr1", range(80, 100), 2)
    data = GenomicData(path=learnt, validation=judged, reference=str(tmp_path / "g.fa"))
    found = examine(data, Objective(task="variant_effect"), seed=0)
    assert len(found.parts["train"]) == 40
    assert any(note.startswith("10 training variants share a position") for note in found.notes)


def test_genomes_that_are_judged_on_are_not_learnt_either(table):
    data = GenomicData(path=table("a.csv", ROWS), validation=table("b.csv", ROWS[:7]))
    assert len(examine(data, Objective(task="generation"), seed=0).parts["train"]) == 33


def test_the_source_domain_does_not_learn_what_is_judged_on(table):
    data = GenomicData(path=table("a.csv", ROWS), validation=table("b.csv", ROWS[:7]),
                       source=table("c.csv", ROWS))  # fmt: skip
    parts = examine(data, Objective(task="domain_adaptation"), seed=0).parts
    judged = {row.sequence for row in parts["validation"]}
    assert not judged & {row.sequence for row in parts["source"]}
    assert len(parts["source validation"]) == 4


def test_a_file_to_judge_on_is_read_beside_made_sequences(table):
    data = GenomicData(validation=table("b.csv", [(text, "site") for text, _ in ROWS]))
    parts = examine(data, Objective(task="domain_adaptation"), seed=0).parts
    assert [row.sequence for row in parts["validation"]] == [text for text, _ in ROWS]


def test_classes_that_are_named_are_those_there_are(table):
    data = GenomicData(path=table("a.csv", ROWS))
    assert classes_of(data) == ("a", "b")
    assert classes_of(data, labels=("b", "c", "a")) == ("b", "c", "a")


def test_numbers_have_no_classes(table):
    rows = [(text, str(n / 7)) for n, (text, _) in enumerate(ROWS)]
    assert classes_of(GenomicData(path=table("a.csv", rows)), target="value") == ()


def test_genomes_longer_than_a_window_are_judged_on_their_tails(tmp_path):
    texts = [bases(1000, 1), bases(500, 2)]
    (tmp_path / "g.fa").write_text(f">a\n{texts[0]}\n>b\n{texts[1]}\n")
    data = GenomicData(path=str(tmp_path / "g.fa"), max_length=64, validation_share=0.2)
    parts = examine(data, Objective(task="generation"), seed=0).parts
    joined = {part: "".join(row.sequence for row in rows) for part, rows in parts.items()}
    assert joined["train"] == texts[0][:800] + texts[1][:400]
    assert joined["validation"] == texts[0][800:] + texts[1][400:]


def test_a_plasmid_beside_a_genome_does_not_change_how_that_is_split(tmp_path):
    genome, plasmid = bases(1000, 1), bases(40, 2)
    (tmp_path / "g.fa").write_text(f">plasmid\n{plasmid}\n>genome\n{genome}\n")
    data = GenomicData(path=str(tmp_path / "g.fa"), max_length=64, validation_share=0.2)
    parts = examine(data, Objective(task="generation"), seed=0).parts
    assert "".join(row.sequence for row in parts["validation"]) == genome[800:]
    assert "".join(row.sequence for row in parts["train"]) == genome[:800] + plasmid


@pytest.mark.parametrize(("letters", "length"), [("ACGTACGTAC", 1), ("A" + "N" * 35 + "ACGT", 20)])
def test_a_letter_alone_foretells_nothing(tmp_path, letters, length):
    (tmp_path / "g.fa").write_text(f">a\n{letters}\n")
    data = GenomicData(path=str(tmp_path / "g.fa"), max_length=length)
    objective = Objective(task="generation")
    rows = examine(data, objective, seed=0).parts["train"]
    with pytest.raises(ConfigError, match=r"g\.fa, record 1: no sequence has a known token"):
        as_examples(rows, Tokenizer(DNA), objective, ())


def test_both_strands_are_learnt_and_one_is_judged_on(table):
    data = GenomicData(path=table("a.csv", ROWS), reverse_complement=True)
    parts = examine(data, Objective(task="generation"), seed=0).parts
    assert (len(parts["train"]), len(parts["validation"])) == (72, 4)


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("generation", {"features": "x.gff"}),
        ("annotation", {"reference": "x.fa"}),
        ("variant_effect", {"source": "x.csv"}),
        ("domain_adaptation", {"stride": 5}),
    ],
)
def test_settings_of_other_tasks_are_refused(task, setting, table):
    data = GenomicData(path=table("a.csv", ROWS), **setting)
    with pytest.raises(ConfigError, match=f"data.{next(iter(setting))} is only for"):
        examine(data, Objective(task=task), seed=0)


def test_classes_of_made_sequences_are_their_own():
    with pytest.raises(ConfigError, match="their own classes"):
        examine(GenomicData(), Objective(task="annotation", labels=("a", "b")), seed=0)


def test_pairs_and_single_sequences_do_not_mix(tmp_path, table):
    (tmp_path / "pairs.csv").write_text(
        "sequence,alternative,label\n" + "".join(f"{t},{t}A,{c}\n" for t, c in ROWS)
    )
    data = GenomicData(path=str(tmp_path / "pairs.csv"), test=table("test.csv", ROWS))
    with pytest.raises(ConfigError, match=r"test\.csv, record 1 has no alternative sequence"):
        examine(data, Objective(task="variant_effect"), seed=0)


def test_too_few_rows_to_judge_on_are_refused(table):
    data = GenomicData(path=table("a.csv", ROWS[:3]))
    with pytest.raises(ConfigError, match="leaves no validation sequences"):
        examine(data, Objective(task="domain_adaptation"), seed=0)


def test_letters_that_are_cut_off_are_told(table):
    data = GenomicData(path=table("a.csv", ROWS), max_length=29)
    found = examine(data, Objective(task="domain_adaptation"), seed=0)
    assert "40 sequences were longer than 29 letters and were cut" in found.notes


def test_a_token_has_the_class_of_its_middle_letter():
    tokenizer = Tokenizer(DNA, 3, 1)
    row = Row(sequence="ACGTACGTAC", letters=np.arange(10))
    examples = as_examples([row], tokenizer, Objective(task="annotation"), ())
    # Letters 0-2, 2-4, 4-6, 6-8, and one that is left.
    assert examples.targets[0].tolist() == [1, 3, 5, 7, 9]
    assert [tokenizer.tokens[at] for at in examples.tokens[0]] == ["ACG", "GTA", "ACG", "GTA", "C"]


def test_a_large_vocabulary_is_kept_whole():
    tokenizer = Tokenizer(DNA, 8, 0)
    row = Row(sequence="GGGGGGGGG")
    ids = as_examples([row], tokenizer, Objective(task="generation"), ()).tokens[0]
    assert tokenizer.decode(ids) == "GGGGGGGGG"
    assert as_examples([row], Tokenizer(DNA), Objective(task="generation"), ()).width == 16


def test_classes_that_are_only_learnt_or_only_judged_are_said(table):
    rare = [*ROWS, (bases(30, 99), "rare")]
    data = GenomicData(
        path=table("a.csv", rare),
        validation=table("b.csv", [(bases(30, 100 + n), "ab"[n % 2]) for n in range(4)]),
        test=table("c.csv", [(bases(30, 200), "new")]),
    )
    notes = examine(data, Objective(task="domain_adaptation"), seed=0).notes
    assert any("no training sequence has the class new," in note for note in notes)
    assert any("no validation sequence has the class rare," in note for note in notes)
    data = data.model_copy(update={"path": table("d.csv", ROWS), "test": ""})
    notes = examine(data, Objective(task="domain_adaptation"), seed=0).notes
    assert not any("has the class" in note for note in notes)


def test_a_named_class_of_no_letter_is_said(tmp_path):
    (tmp_path / "g.fa").write_text(f">chr1\n{bases(600, 0)}\n")
    lines = [f"chr1\tx\tgene\t{at}\t{at + 30}\t.\t+\t.\tID=g{at}" for at in range(1, 550, 60)]
    (tmp_path / "g.gff").write_text("\n".join(["##gff-version 3", *lines]))
    data = GenomicData(path=str(tmp_path / "g.fa"), features=str(tmp_path / "g.gff"), max_length=50)
    objective = Objective(task="annotation", labels=("none", "gene", "exon"))
    notes = examine(data, objective, seed=0).notes
    assert [note for note in notes if "class" in note] == [
        "no training letter has the class exon, so it cannot be learnt"
    ]


def test_a_genome_of_one_window_is_to_be_cut_shorter(tmp_path):
    (tmp_path / "g.fa").write_text(f">chr1\n{bases(600, 0)}\n")
    data = GenomicData(path=str(tmp_path / "g.fa"), max_length=600)
    with pytest.raises(ConfigError, match="or write a smaller"):
        examine(data, Objective(task="generation"), seed=0)
