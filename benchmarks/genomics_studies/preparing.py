"""Raw files of public benchmarks, cut into the parts that are learnt, judged on and tested.

Every part is a plain table or FASTA, so that a machine that trains needs no reader of archives or
of GenBank. What is cut where is said by each function; nothing is drawn but by a fixed seed.
"""

import csv
import gzip
import io
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

SEED = 0
FOLDS = 10
"""Of the splice junctions, as they are usually judged."""
GUE = ("prom_core_tata", "prom_300_tata", "prom_core_all")
GB1 = ("one_vs_rest", "two_vs_rest", "three_vs_rest", "low_vs_high", "sampled")
GB1_WINDOW = slice(36, 56)
"""Residues 37 to 56 of the protein: variants differ at 39, 40, 41 and 54, and nowhere else."""
EXON_FOLDS = (
    ("X2", "X16", "X21"),
    ("X3", "X17", "X22"),
    ("X4", "X18", "X20"),
    ("X5", "X15"),
    ("X19", "X23"),
)
"""Exons of BRCA1 that are tested together: none has a neighbour it shares an exon with."""
TAIL = 0.1
"""Share of a genome that is tested; as much before it is judged on."""
COMPLEMENT = str.maketrans("ACGTN", "TGCAN")


def prepare(raw: Path, into: Path, studies: Sequence[str]) -> None:
    """Write the parts of every study that is asked for."""
    for name, make in MAKERS.items():
        if name in studies:
            make(raw, into / name)


def prepare_gue(raw: Path, into: Path) -> None:
    """Copy train, dev and test as they are; the workload leaves out what stands in two of them."""
    for task in GUE:
        (into / task).mkdir(parents=True, exist_ok=True)
        for part, name in (("train", "train"), ("dev", "validation"), ("test", "test")):
            source = raw / "gue" / task / f"{part}.csv.gz"
            shutil.copyfile(source, into / task / f"{name}.csv.gz")


def prepare_gb1(raw: Path, into: Path) -> None:
    """Cut the window with all variation out, and the parts as FLIP's own columns say."""
    with zipfile.ZipFile(raw / "flip_gb1" / "splits.zip") as archive:
        for split in GB1:
            text = archive.read(f"splits/{split}.csv").decode()
            parts = defaultdict(list)
            for row in csv.DictReader(io.StringIO(text)):
                held = "validation" if row["validation"] == "True" else "train"
                part = "test" if row["set"] == "test" else held
                parts[part].append((row["sequence"][GB1_WINDOW], row["target"]))
            for part, rows in parts.items():
                _write_table(into / split / f"{part}.csv.gz", ("sequence", "label"), rows)


def prepare_splice(raw: Path, into: Path) -> None:
    """Cut ten folds with equal shares of the classes; settings are judged on the next fold.

    While they are chosen the eight others are learnt. `rest`, those and the one that was judged on,
    is learnt when they are tested: all but the tested fold, as others do it.
    """
    with (raw / "splice_uci" / "splice.csv").open() as file:
        rows = [(r["sequence"].strip(), r["label"].strip()) for r in csv.DictReader(file)]
    # Dealt as halves, of which each fold has two: the folds are those of the first results.
    fold = _stratified([label for _, label in rows], 2 * FOLDS) // 2
    for number in range(FOLDS):
        tested, judged = fold == number, fold == (number + 1) % FOLDS
        parts = {
            "test": tested, "validation": judged, "train": ~tested & ~judged, "rest": ~tested,
        }  # fmt: skip
        for part, chosen in parts.items():
            kept = [rows[at] for at in np.flatnonzero(chosen)]
            _write_table(into / f"fold{number}" / f"{part}.csv.gz", ("sequence", "label"), kept)


def prepare_brca1(raw: Path, into: Path) -> None:
    """Turn variants to the strand that is read, and cut them by exon.

    A fold tests whole exons; the exons of the next fold are judged on, the others learnt. Exons
    are more than 450 bases apart, so that no tested position has a learnt neighbour.
    """
    folder = raw / "brca1_sge"
    head, *lines = _text(folder / "chr17_hg19_41176312_41370000.fa.gz").splitlines()
    first, last = (int(each) for each in head.split()[0].split(":")[1].split("-"))
    plus = "".join(lines).upper()
    into.mkdir(parents=True, exist_ok=True)
    _write_text(into / "reference.fa.gz", f">BRCA1\n{_other_strand(plus)}\n")
    by_exon = defaultdict(list)
    for row in csv.DictReader(io.StringIO(_text(folder / "brca1_sge_3893.csv.gz"))):
        at = int(row["pos_hg19"])
        if plus[at - first] != row["ref"]:
            raise SystemExit(f"BRCA1 {at}: the reference has {plus[at - first]}, not {row['ref']}")
        letters = [_other_strand(row[key]) for key in ("ref", "alt")]
        label = "LOF" if row["func_class"] == "LOF" else "other"
        by_exon[row["exon"]].append(
            ("BRCA1", last - at + 1, *letters, label, row["cadd"], row["phylop"])
        )
    columns = ("chrom", "pos", "ref", "alt", "label", "cadd", "phylop")
    for number, tested in enumerate(EXON_FOLDS):
        judged = EXON_FOLDS[(number + 1) % len(EXON_FOLDS)]
        for part, exons in (
            ("test", tested),
            ("validation", judged),
            ("train", [each for each in by_exon if each not in (*tested, *judged)]),
        ):
            rows = [row for exon in exons for row in by_exon[exon]]
            _write_table(into / f"fold{number}" / f"{part}.csv.gz", columns, rows)


def prepare_structure(raw: Path, into: Path) -> None:
    """Put the classes of residues beside them; those the mask leaves out are not judged."""
    with zipfile.ZipFile(raw / "flip_secondary_structure" / "splits.zip") as archive:
        found = {
            name: dict(_fasta(archive.read(f"splits/{name}.fasta").decode()))
            for name in ("sequences", "mask", "sampled")
        }
    sequences = {head.split()[0]: text for head, text in found["sequences"].items()}
    masks = {head.split()[0]: text for head, text in found["mask"].items()}
    parts = defaultdict(list)
    for head, classes in found["sampled"].items():
        name, kind, validation = head.split()
        held = "validation" if validation == "VALIDATION=True" else "train"
        seen = zip(classes, masks[name], strict=True)
        labels = "".join(each if mask == "1" else UNJUDGED for each, mask in seen)
        parts["test" if kind == "SET=test" else held].append((sequences[name], labels))
    for part, rows in parts.items():
        _write_table(into / f"{part}.csv.gz", ("sequence", "label"), rows)


UNJUDGED = "-"


def prepare_genes(raw: Path, into: Path) -> None:
    """Lay genes on the bases of contigs; the last tenth of each is tested, that before judged on.

    Contigs shorter than 20,000 bases are learnt as a whole.
    """
    from narrowcast.workloads.genomics.sequences.labels import base_labels
    from narrowcast.workloads.genomics.sequences.readers.reading import read_records

    parts = defaultdict(list)
    path = raw / "genomes" / "GCF_000243915.1_leptospira.gbk.gz"
    for record in read_records(path):
        genes = base_labels(len(record.sequence), record.features, {"gene": 1})
        labels = "".join("01"[each] for each in genes)
        for part, cut in _tails(len(record.sequence), whole_below=20_000):
            parts[part].append((record.sequence[cut], labels[cut]))
    for part, rows in parts.items():
        _write_table(into / f"{part}.csv.gz", ("sequence", "label"), rows)


def prepare_generation(raw: Path, into: Path) -> None:
    """Cut the last tenth of a genome off for the test, and the tenth before it to judge on."""
    ((head, text),) = _fasta(_text(raw / "genomes" / "NC_008253_ecoli536.fna.gz"))
    into.mkdir(parents=True, exist_ok=True)
    for part, cut in _tails(len(text), whole_below=0):
        _write_text(into / f"{part}.fa.gz", f">{head.split()[0]}\n{text[cut].upper()}\n")


MAKERS: Mapping[str, Callable[[Path, Path], None]] = {
    "gue": prepare_gue,
    "gb1": prepare_gb1,
    "splice": prepare_splice,
    "brca1": prepare_brca1,
    "structure": prepare_structure,
    "genes": prepare_genes,
    "generation": prepare_generation,
}


def _tails(length: int, *, whole_below: int) -> Iterator[tuple[str, slice]]:
    if length < whole_below:
        yield "train", slice(None)
        return
    judged, tested = round(length * (1 - 2 * TAIL)), round(length * (1 - TAIL))
    yield "train", slice(0, judged)
    yield "validation", slice(judged, tested)
    yield "test", slice(tested, None)


def _stratified(labels: Sequence[str], folds: int) -> np.ndarray:
    """Deal the rows of each class out to folds, in an order drawn by a fixed seed."""
    order, fold = np.random.default_rng(SEED).permutation(len(labels)), np.empty(len(labels), int)
    dealt = dict.fromkeys(labels, 0)
    for at in order:
        fold[at] = dealt[labels[at]] % folds
        dealt[labels[at]] += 1
    return fold


def _other_strand(text: str) -> str:
    return text.translate(COMPLEMENT)[::-1]


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def _fasta(text: str) -> Iterator[tuple[str, str]]:
    for record in text.split(">")[1:]:
        head, _, sequence = record.partition("\n")
        yield head, sequence.replace("\n", "")


def _write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    _write_text(path, out.getvalue())


def _write_text(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
