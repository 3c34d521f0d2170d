"""What results stand beside: simple methods and published scores, on the very same parts.

Each is given the folder of the prepared parts and the number of a fold, and returns measures of the
tested part. What a method has to choose it chooses on the part that is judged on.
"""

import csv
import gzip
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from scipy import stats
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression, Ridge

from genomics_studies.preparing import GB1

Measured = dict[str, float]
Baseline = Callable[[Path, int], Measured]

PROTEIN = "ACDEFGHIKLMNPQRSTVWY"
STARTS, STOPS = ("ATG", "GTG", "TTG"), ("TAA", "TAG", "TGA")
SHORTEST_ORFS = (60, 90, 120, 150, 180, 210, 240, 270, 300, 360, 420, 500, 600)
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""By which weights of a logistic regression are held back: 1 / C."""
REACH = 8
"""Residues to either side that decide on a structure in the method of GOR."""
WINDOW = 2048
"""Bases that the networks see at once: a chain of bases begins anew where they do."""
ORDERS = range(1, 12)
SMOOTHINGS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


def ridge(split: str) -> Baseline:
    """Return ridge regression on one letter of twenty for each residue, as FLIP has it."""

    def judge(data: Path, fold: int) -> Measured:
        parts = {part: _rows(data / "gb1" / split / f"{part}.csv.gz") for part in ("train", "test")}
        validation = _rows(data / "gb1" / split / "validation.csv.gz")
        learnt = parts["train"] + validation
        model = Ridge(alpha=1.0)
        model.fit(_one_hot(learnt, PROTEIN), [float(row["label"]) for row in learnt])
        found = model.predict(_one_hot(parts["test"], PROTEIN))
        truth = [float(row["label"]) for row in parts["test"]]
        return {"spearman": float(stats.spearmanr(truth, found).statistic)}

    return judge


def logistic(data: Path, fold: int) -> Measured:
    """Judge logistic regression on the bases of splice junctions; how strongly it is held back is
    the best strength on the part that is judged on, which is learnt as well afterwards."""
    folder = data / "splice" / f"fold{fold}"
    parts = {
        part: _rows(folder / f"{part}.csv.gz") for part in ("train", "validation", "rest", "test")
    }
    test, judged = parts["test"], parts["validation"]
    learnt = _without(parts["train"], judged + test)
    strength = max(STRENGTHS, key=lambda each: _logistic(learnt, judged, each))
    value = _logistic(_without(parts["rest"], test), test, strength)
    return {"accuracy": value, "strength": strength}


def _logistic(learnt: list[dict[str, str]], judged: list[dict[str, str]], strength: float) -> float:
    model = LogisticRegression(C=1 / strength, max_iter=500)
    model.fit(_one_hot(learnt, "ACGT"), [row["label"] for row in learnt])
    found = model.predict(_one_hot(judged, "ACGT"))
    return float(np.mean(np.array([row["label"] for row in judged]) == found))


def _without(rows: list[dict[str, str]], judged: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows whose sequences are not judged on, as the workload does."""
    known = {row["sequence"] for row in judged}
    return [row for row in rows if row["sequence"] not in known]


def published_score(column: str) -> Baseline:
    """Return what a score of others, which a column has, says of the tested variants."""

    def judge(data: Path, fold: int) -> Measured:
        rows = _rows(data / "brca1" / f"fold{fold}" / "test.csv.gz")
        truth = [row["label"] == "LOF" for row in rows]
        return {"auroc": float(sk.roc_auc_score(truth, [float(row[column]) for row in rows]))}

    return judge


def gor(data: Path, fold: int) -> Measured:
    """Judge residues by the sum of what each residue nearby says on its own (GOR I)."""
    folder, classes = data / "structure", "CEH"
    counts = np.ones((2 * REACH + 1, len(PROTEIN) + 2, len(classes)))
    for row in _rows(folder / "train.csv.gz"):
        letters, labels = _padded(row["sequence"]), np.array([*row["label"]])
        for number, name in enumerate(classes):
            at = np.flatnonzero(labels == name)
            for offset in range(2 * REACH + 1):
                np.add.at(counts[offset, :, number], letters[at + offset], 1)
    evidence = np.log(counts / counts.sum(1, keepdims=True))
    prior = np.log(counts[REACH].sum(0) / counts[REACH].sum())
    right = total = 0
    for row in _rows(folder / "test.csv.gz"):
        letters, labels = _padded(row["sequence"]), np.array([*row["label"]])
        length = len(labels)
        score = prior + sum(evidence[k, letters[k : k + length]] for k in range(2 * REACH + 1))
        found = np.array([*classes])[score.argmax(1)]
        right += int(((found == labels) & (labels != "-")).sum())
        total += int((labels != "-").sum())
    return {"accuracy": right / total}


def long_frames(data: Path, fold: int) -> Measured:
    """Call every open reading frame of some length a gene; the length is the best one judged on."""
    folder = data / "genes"
    judged = [_rows(folder / f"{part}.csv.gz") for part in ("validation", "test")]
    frames = [[(row, _frames(row["sequence"])) for row in rows] for rows in judged]
    shortest = max(SHORTEST_ORFS, key=lambda least: _called(frames[0], least)["mcc"])
    return _called(frames[1], shortest) | {"shortest_orf": shortest}


def chain(data: Path, fold: int) -> Measured:
    """Judge a Markov chain of bases; its order and smoothing are the best ones judged on."""
    parts = {
        part: _bases(data / "generation" / f"{part}.fa.gz")
        for part in ("train", "validation", "test")
    }
    # The networks learn both strands as well.
    learnt = [parts["train"], np.where(parts["train"] < 4, 3 - parts["train"], 4)[::-1]]
    tables = {order: _counted(learnt, order) for order in range(ORDERS[-1] + 1)}
    found = {
        (order, smoothing): _perplexity(tables, parts["validation"], order, smoothing)
        for order in ORDERS
        for smoothing in SMOOTHINGS
    }
    order, smoothing = min(found, key=lambda each: found[each])
    value = _perplexity(tables, parts["test"], order, smoothing)
    return {"perplexity": value, "order": order, "smoothing": smoothing}


BASELINES: Mapping[str, Mapping[str, Baseline]] = {
    **{f"GB1 {split}": {"one-hot ridge": ridge(split)} for split in GB1},
    "UCI splice": {"one-hot logistic": logistic},
    "BRCA1 by exon": {"CADD": published_score("cadd"), "phyloP": published_score("phylop")},
    "FLIP secondary structure": {"GOR I": gor},
    "genes of Leptospira": {"long ORFs": long_frames},
    "next base of E. coli": {"Markov chain": chain},
}


def _rows(path: Path) -> list[dict[str, str]]:
    csv.field_size_limit(2**28)
    return list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))


def _one_hot(rows: list[dict[str, str]], letters: str) -> np.ndarray:
    table = np.array([[*row["sequence"]] for row in rows])
    return np.concatenate([table == each for each in letters], 1).astype(np.float64)


def _padded(sequence: str) -> np.ndarray:
    """Return residues by number, others than twenty as one, with nothing about both ends."""
    numbers = {letter: at for at, letter in enumerate(PROTEIN)}
    inside = [numbers.get(letter, len(PROTEIN)) for letter in sequence]
    return np.pad(inside, REACH, constant_values=len(PROTEIN) + 1)


def _frames(sequence: str) -> list[tuple[int, int]]:
    """Return where frames lie, on both strands: from the first start after a stop to a stop.

    One that is open at an end of the sequence reaches to that end.
    """
    length = len(sequence)
    other = sequence.translate(str.maketrans("ACGTN", "TGCAN"))[::-1]
    here = list(_frames_of(sequence))
    return here + [(length - end, length - start) for start, end in _frames_of(other)]


def _frames_of(strand: str) -> list[tuple[int, int]]:
    found = []
    for frame in range(3):
        start: int | None = frame
        for at in range(frame, len(strand) - 2, 3):
            codon = strand[at : at + 3]
            if codon in STOPS:
                if start is not None:
                    found.append((start, at + 3))
                start = None
            elif start is None and codon in STARTS:
                start = at
        if start is not None:
            found.append((start, len(strand)))
    return found


def _called(rows: list[tuple[dict[str, str], list[tuple[int, int]]]], shortest: int) -> Measured:
    truth, found = [], []
    for row, frames in rows:
        called = np.zeros(len(row["sequence"]), int)
        for start, end in frames:
            if end - start >= shortest:
                called[start:end] = 1
        truth.append(np.array([*row["label"]]).astype(int))
        found.append(called)
    a, b = np.concatenate(truth), np.concatenate(found)
    return {
        "mcc": float(sk.matthews_corrcoef(a, b)),
        "accuracy": float((a == b).mean()),
        "f1": float(sk.f1_score(a, b, average="macro")),
    }


def _bases(path: Path) -> np.ndarray:
    """Return the bases of a genome by number, 4 for any other letter."""
    text = gzip.decompress(path.read_bytes()).decode()
    sequence = re.sub(r"\s", "", text.partition("\n")[2])
    table = np.full(256, 4, dtype=np.int64)
    for number, letter in enumerate("ACGT"):
        table[ord(letter)] = number
    return table[np.frombuffer(sequence.encode(), np.uint8)]


def _contexts(bases: np.ndarray, order: int) -> np.ndarray:
    """Return for every place what `order` letters and its own make, as one number; -1 for none."""
    number = np.zeros(len(bases) - order, dtype=np.int64)
    whole = np.ones(len(bases) - order, dtype=bool)
    for back in range(order + 1):
        letters = bases[back : len(bases) - order + back]
        number = number * 4 + np.minimum(letters, 3)
        whole &= letters < 4
    return np.where(whole, number, -1)


def _counted(strands: list[np.ndarray], order: int) -> np.ndarray:
    counts = np.zeros(4 ** (order + 1))
    for strand in strands:
        seen = _contexts(strand, order)
        counts += np.bincount(seen[seen >= 0], minlength=len(counts))
    return counts.reshape(-1, 4)


def _perplexity(
    tables: Mapping[int, np.ndarray], bases: np.ndarray, order: int, smoothing: float
) -> float:
    """Judge every base but the first of a window, by those before it in the window."""
    nats, count = 0.0, 0
    place = np.arange(len(bases)) % WINDOW
    for depth in range(1, order + 1):
        chances = _smoothed(tables, depth, smoothing)
        at = np.arange(depth, len(bases))
        judged = place[depth:] >= order if depth == order else place[depth:] == depth
        seen = _contexts(bases, depth)[judged & (at > 0)]
        seen = seen[seen >= 0]
        nats -= float(np.log(chances.reshape(-1)[seen]).sum())
        count += len(seen)
    return float(np.exp(nats / count))


def _smoothed(tables: Mapping[int, np.ndarray], order: int, smoothing: float) -> np.ndarray:
    """Return chances of the next base: counts, and as many as `smoothing` of the order below."""
    chances = np.full((1, 4), 0.25)
    for depth in range(order + 1):
        counts = tables[depth]
        # What precedes decides less the further away it is: drop the first letter.
        below = np.tile(chances, (len(counts) // len(chances), 1))
        chances = (counts + smoothing * below) / (counts.sum(1, keepdims=True) + smoothing)
    return chances
