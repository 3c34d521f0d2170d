"""What is to be found in made sequences is there, as counts of them say."""

from collections import Counter

import numpy as np
import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data import made
from narrowcast.workloads.genomics.settings import TASK_LABELS


def rows(task, part="train", *, function="go", seed=0):
    return made.made_rows(task, function=function, seed=seed, part=part)


@pytest.mark.parametrize(
    "task", ["annotation", "variant_effect", "protein_function", "domain_adaptation"]
)
def test_parts_and_seeds_give_other_sequences_and_one_seed_the_same(task):
    first, again, other, judged = (
        [row.sequence for row in rows(task, part, seed=seed)]
        for part, seed in (("train", 0), ("train", 0), ("train", 1), ("validation", 0))
    )
    assert first == again
    assert not set(first) & set(other)
    assert not set(first) & set(judged)


def test_the_genome_has_the_entropy_that_is_told():
    (genome,) = rows("generation")
    text, order = genome.sequence, made.MARKOV_ORDER
    longer = Counter(text[at : at + order + 1] for at in range(len(text) - order))
    shorter = Counter(text[at : at + order] for at in range(len(text) - order))
    nats = -sum(n * np.log(n / shorter[key[:-1]]) for key, n in longer.items())
    assert nats / (len(text) - order) == pytest.approx(made.markov_entropy(), abs=0.005)


def test_genes_are_read_in_frame_from_start_to_stop():
    (genome,) = rows("annotation")
    gene = TASK_LABELS["annotation"].index("gene")
    inside = np.concatenate([[0], genome.letters == gene, [0]]).astype(int)
    starts, ends = (np.flatnonzero(np.diff(inside) == sign) for sign in (1, -1))
    assert len(genome.letters) == len(genome.sequence)
    assert len(starts) == 400
    for start, end in zip(starts, ends, strict=True):
        text = genome.sequence[start:end]
        codons = [text[at : at + 3] for at in range(0, len(text), 3)]
        assert codons[0] == "ATG"
        assert codons[-1] in made.STOPS
        assert not set(codons[1:-1]) & set(made.STOPS)


def test_a_variant_is_one_letter_and_harms_by_what_it_hits():
    worst, best = TASK_LABELS["variant_effect"][-1], TASK_LABELS["variant_effect"][0]
    found = rows("variant_effect")
    for row in found:
        (at,) = [n for n, pair in enumerate(zip(row.sequence, row.alternative, strict=True))
                 if pair[0] != pair[1]]  # fmt: skip
        start = row.sequence.index(made.SITE)
        whole = made.SITE in row.alternative
        assert whole is (row.label == best)
        if row.label == worst:
            assert 3 <= at - start <= 6
    assert {row.label for row in found} == set(TASK_LABELS["variant_effect"])


@pytest.mark.parametrize("function", ["go", "ec"])
def test_a_protein_has_the_motif_of_its_class(function):
    classes = TASK_LABELS[f"protein_function_{function}"]
    for row in rows("protein_function", "validation", function=function):
        motif = made.DOMAINS[function][classes.index(row.label)]
        fits = [
            all(m in ("X", r) for m, r in zip(motif, row.sequence[at:], strict=False))
            for at in range(len(row.sequence) - len(motif) + 1)
        ]
        assert any(fits)


def test_made_sequences_are_of_the_alphabet_that_is_asked_for():
    with pytest.raises(ConfigError, match=r"proteins. Write data.alphabet=protein"):
        made.made_parts("protein_function", "go", "dna", seed=0)
    with pytest.raises(ConfigError, match=r"DNA. Write data.alphabet=dna"):
        made.made_parts("generation", "go", "protein", seed=0)
    parts = made.made_parts("domain_adaptation", "go", "dna", seed=0)
    assert list(parts) == ["train", "validation", "source", "source validation"]
