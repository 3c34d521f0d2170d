"""Synthetic sequences drawn from a seed, with a known signal per task, for demos and tests."""

from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data.rows import Numbers, Row
from narrowcast.workloads.genomics.settings import MADE, TASK_LABELS

PLACE = f"data.path={MADE}"
BASES = "ATCG"
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"

CODONS = ("GCG", "CTG", "GAA", "AAA", "GGC", "ATT", "GAT", "CAG", "CCG", "ACC", "AGC", "GTG")
"""Frequent codons of E. coli, used in synthetic genes."""
STOPS = ("TAA", "TGA", "TAG")
PROMOTER = "TTGACATTTATGCTTCCGGCTCGTATAATGTGTGG"
"""A promoter like that of the lac operon: -35 and -10 boxes at their distance."""

SITE = "TGACGTCATGCA"
"""Motif that variants may break; SITE_WEIGHTS is how much each letter matters."""
SITE_WEIGHTS = (1, 2, 3, 4, 4, 4, 4, 3, 3, 2, 1, 1)

DOMAINS = {
    "go": ("GXGXXG", "CXXC", "HXXXH", "WXXW", "DEAD", "KXXK", "RGD"),
    "ec": ("GXSXG", "HXGH", "CXXCH", "DXDXT", "GKS", "EXXK", "PXXP"),
}
"""Motifs of protein classes; X is any residue."""

MARKOV_ORDER = 3
LENGTH = 64
"""Letters of a synthetic sequence around a variant."""


def made_parts(task: str, function: str, alphabet: str, *, seed: int) -> dict[str, list[Row]]:
    """Return the synthetic rows of a task by part."""
    proteins = task == "protein_function"
    if proteins is not (alphabet == "protein"):
        raise ConfigError(
            f"data.alphabet={alphabet} does not match the synthetic sequences of {task}, which are "
            f"{'proteins' if proteins else 'DNA'}. Write "
            f"data.alphabet={'protein' if proteins else 'dna'}, or your own file in data.path."
        )
    parts = ["train", "validation"]
    if task == "classify":
        parts.append("test")
    if task == "domain_adaptation":
        parts += ["source", "source validation"]
    return {part: made_rows(task, function=function, seed=seed, part=part) for part in parts}


def made_rows(task: str, *, function: str, seed: int, part: str) -> list[Row]:
    """Return the synthetic rows of one part (train, validation, source)."""
    rng = np.random.default_rng([seed, sum(part.encode()), len(task)])
    if task == "protein_function":
        return _proteins(rng, function, count=200 if part == "validation" else 800)
    return _MAKERS[task](rng, part)


def _annotated(rng: np.random.Generator, part: str) -> list[Row]:
    """Return an annotated genome of promoters, genes and intergenic sequence."""
    between, gene, promoter = (
        TASK_LABELS["annotation"].index(name) for name in ("intergenic", "gene", "promoter")
    )
    pieces, labels = list[str](), list[Numbers]()

    def add(text: str, label: int) -> None:
        pieces.append(text)
        labels.append(np.full(len(text), label, dtype=np.int64))

    for _ in range(40 if part == "validation" else 400):
        add(_random(rng, BASES, int(rng.integers(40, 260))), between)
        add(_mutated(rng, PROMOTER, BASES, share=0.1), promoter)
        body = "".join(rng.choice(CODONS, int(rng.integers(40, 160))))
        add(f"ATG{body}{rng.choice(STOPS)}", gene)
    return [
        Row(sequence="".join(pieces), letters=np.concatenate(labels), name="made", location=PLACE)
    ]


def _variants(rng: np.random.Generator, part: str) -> list[Row]:
    """Return pairs with one substitution, inside the site or next to it, where it has no effect."""
    classes, rows = TASK_LABELS["variant_effect"], []
    for number in range(256 if part == "validation" else 1600):
        # In the middle, as windows around variants are cut; a site that it hits, or one beside it.
        sequence, inside = _random(rng, BASES, LENGTH), int(rng.integers(-3, len(SITE)))
        at = LENGTH // 2
        start = at - inside if inside >= 0 else at + 1 + int(rng.integers(LENGTH // 2 - len(SITE)))
        sequence = sequence[:start] + SITE + sequence[start + len(SITE) :]
        other = str(rng.choice([base for base in BASES if base != sequence[at]]))
        effect = SITE_WEIGHTS[inside] if inside >= 0 else 0
        alternative = sequence[:at] + other + sequence[at + 1 :]
        rows.append(
            Row(
                sequence=sequence, alternative=alternative, label=classes[effect],
                name=f"{at + 1}{sequence[at]}>{other}", location=f"{PLACE}, row {number + 1}",
            )
        )  # fmt: skip
    return rows


def _proteins(rng: np.random.Generator, function: str, *, count: int) -> list[Row]:
    """Return proteins that contain the motif of their class three times."""
    classes, rows = TASK_LABELS[f"protein_function_{function}"], []
    for number in range(count):
        kind = int(rng.integers(len(classes)))
        text = _random(rng, RESIDUES, int(rng.integers(40, 72)))
        for at in rng.choice(len(text) // 8, 3, replace=False) * 8:
            motif = "".join(
                str(rng.choice(list(RESIDUES))) if letter == "X" else letter
                for letter in DOMAINS[function][kind]
            )
            text = text[:at] + motif + text[at + len(motif) :]
        rows.append(
            Row(
                sequence=text, label=classes[kind], name=f"protein{number + 1}",
                location=f"{PLACE}, row {number + 1}",
            )
        )  # fmt: skip
    return rows


def _genome(rng: np.random.Generator, part: str) -> list[Row]:
    """Return a third-order Markov chain of bases."""
    table = _markov_table()
    length = 16_384 if part == "validation" else 196_608
    sums = table.cumsum(1)[:, :3].tolist()
    state, letters = 0, list[str]()
    for drawn in rng.random(length).tolist():
        letter = bisect_left(sums[state], drawn)
        letters.append(BASES[letter])
        state = (state * 4 + letter) % len(table)
    return [Row(sequence="".join(letters), name="made", location=PLACE)]


def markov_entropy() -> float:
    """Return the conditional entropy of the synthetic genome, in nats per base."""
    table = _markov_table()
    step = np.zeros((len(table), len(table)))
    for state in range(len(table)):
        for letter in range(4):
            step[state, (state * 4 + letter) % len(table)] += table[state, letter]
    visited = np.full(len(table), 1 / len(table))
    for _ in range(200):  # the chain forgets where it began long before
        visited = visited @ step
    return float(-(visited[:, None] * table * np.log(table)).sum())


def _markov_table() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return next-letter probabilities by the letters before, the same for every seed."""
    rng = np.random.default_rng(0)
    chances = rng.gamma(0.4, size=(4**MARKOV_ORDER, 4)) + 0.02
    table: np.ndarray[tuple[int, int], np.dtype[np.float64]] = chances / chances.sum(1)[:, None]
    return table


def _domains(rng: np.random.Generator, part: str) -> list[Row]:
    """Return sequences with or without a site; the target domain has another base composition."""
    source = part.startswith("source")
    chances = (0.25, 0.25, 0.25, 0.25) if source else (0.38, 0.38, 0.12, 0.12)
    counts = {"source": 2000, "source validation": 400, "validation": 400}
    rows = []
    for number in range(counts.get(part, 320)):
        text, label = _random(rng, BASES, 120, chances), int(rng.integers(2))
        if label:
            site = SITE if source else _mutated(rng, SITE, BASES, share=0.08)
            at = int(rng.integers(0, 120 - len(SITE)))
            text = text[:at] + site + text[at + len(SITE) :]
        rows.append(
            Row(
                sequence=text, label=("other", "site")[label], name=f"{part} {number + 1}",
                location=f"{PLACE}, {part}, row {number + 1}",
            )
        )  # fmt: skip
    return rows


def _labelled(rng: np.random.Generator, part: str) -> list[Row]:
    """Return sequences with a site or with its letters in another order, on either strand."""
    rows = []
    for number in range({"train": 1600, "validation": 200, "test": 400}[part]):
        text, label = _random(rng, BASES, LENGTH), int(rng.integers(2))
        site = _mutated(rng, SITE if label else SITE[::2] + SITE[1::2], BASES, share=0.08)
        if rng.integers(2):
            site = site.translate(str.maketrans("ACGT", "TGCA"))[::-1]
        at = int(rng.integers(0, LENGTH - len(SITE)))
        rows.append(
            Row(
                sequence=text[:at] + site + text[at + len(SITE) :], label=("other", "site")[label],
                name=f"{part} {number + 1}", location=f"{PLACE}, {part}, row {number + 1}",
            )
        )  # fmt: skip
    return rows


def _random(
    rng: np.random.Generator, letters: str, length: int, chances: tuple[float, ...] | None = None
) -> str:
    return "".join(rng.choice(list(letters), length, p=chances))


def _mutated(rng: np.random.Generator, text: str, letters: str, *, share: float) -> str:
    count = int(rng.binomial(len(text), share))
    out = list(text)
    for at in rng.choice(len(text), count, replace=False):
        out[at] = str(rng.choice(list(letters)))
    return "".join(out)


_MAKERS: Mapping[str, Callable[[np.random.Generator, str], list[Row]]] = {
    "annotation": _annotated,
    "variant_effect": _variants,
    "generation": _genome,
    "domain_adaptation": _domains,
    "classify": _labelled,
}
