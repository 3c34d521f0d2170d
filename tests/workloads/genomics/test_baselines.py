"""Linear baselines: what scikit-learn computes from the same counts."""

from itertools import product

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from narrowcast.workloads.genomics.baselines import choose_mix, compare, fit_baselines
from narrowcast.workloads.genomics.data.examples import Examples, Ragged
from narrowcast.workloads.genomics.models.linear import Features
from narrowcast.workloads.genomics.sequences.alphabets import DNA, PROTEIN
from narrowcast.workloads.genomics.sequences.operations import reverse_complement
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.targets import Labels, OneClass, Value

TOKENS = Tokenizer(DNA)
FIRST = TOKENS.vocab_size - 4
COMPLEMENT = tuple(DNA.letters.index(DNA.complement[each]) for each in DNA.letters)


def drawn(count, length, seed):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("ACGT"), length)) for _ in range(count)]


def examples(sequences, targets, tokenizer=TOKENS):
    ids = [tokenizer.encode(text).astype(np.uint16) for text in sequences]
    return Examples(tokens=Ragged.joined(ids, np.uint16), targets=np.array(targets))


def counted(features, sequences, tokenizer=TOKENS):
    rows = examples(sequences, [0] * len(sequences), tokenizer)
    indices = features.indices(rows.__getitems__([*range(len(sequences))])["tokens"])
    return torch.stack([torch.bincount(row, minlength=features.size + 1)[:-1] for row in indices])


def test_kmers_are_counted_as_scikit_learn_counts_them():
    sequences = ["ACGTNNACGT", "TTTTT", "ACGT" * 5, "G"]
    features = Features(letters=4, first=FIRST, k=3)
    names = ["".join(k).lower() for n in (1, 2, 3) for k in product(DNA.letters, repeat=n)]
    theirs = CountVectorizer(analyzer="char", ngram_range=(1, 3), vocabulary=names)
    assert counted(features, sequences).tolist() == theirs.transform(sequences).toarray().tolist()


def test_both_strands_have_the_same_kmers():
    sequences = drawn(5, 40, seed=0)
    features = Features(letters=4, first=FIRST, k=4, complement=COMPLEMENT)
    others = [reverse_complement(text, DNA) for text in sequences]
    assert torch.equal(counted(features, sequences), counted(features, others))


def test_letters_by_position_are_one_hot():
    features = Features(letters=4, first=FIRST, length=3)
    expected = [[letter == base for base in DNA.letters] for letter in "GNA"]
    assert counted(features, ["GNAT"]).tolist() == [np.array(expected).astype(int).ravel().tolist()]


def test_a_baseline_is_the_logistic_regression_of_scikit_learn():
    texts = drawn(400, 30, seed=1)
    classes = np.array([("AC" in text) + ("GT" in text) for text in texts])
    target = OneClass(classes=("0", "1", "2"), smoothing=0.3)
    learnt, judged = examples(texts[:300], classes[:300]), examples(texts[300:], classes[300:])
    baselines = fit_baselines(learnt, judged, target, letters=4, first=FIRST)
    ours = baselines.kmers.linear(judged.__getitems__([*range(100)])["tokens"]).softmax(-1)
    k = baselines.kmers.linear.features.k
    counts = CountVectorizer(analyzer="char", ngram_range=(1, k), min_df=5).fit(texts[:300])
    learn, judge = (
        counts.transform(part).toarray().astype(float) for part in (texts[:300], texts[300:])
    )
    scaler = StandardScaler().fit(learn)
    losses = []
    for strength in (1e-4, 1e-3, 1e-2, 1e-1):
        model = LogisticRegression(C=strength, max_iter=500)
        model.fit(scaler.transform(learn), classes[:300])
        chances = model.predict_proba(scaler.transform(judge))
        losses.append(-np.log(chances[np.arange(100), classes[300:]]).mean())
    # Without k-mers that occur fewer than five times, so not the same to the last digit.
    assert baselines.kmers.loss == pytest.approx(min(losses), rel=0.15)
    mine = -ours.log()[torch.arange(100), torch.from_numpy(classes[300:])].mean()
    assert float(mine) == pytest.approx(baselines.kmers.loss, rel=1e-4)


@pytest.mark.parametrize("both", [True, False])
def test_strands_are_told_apart_where_labels_depend_on_them(both):
    rng, texts, classes = np.random.default_rng(2), [], []
    for number, text in enumerate(drawn(900, 60, seed=3)):
        site = "TTGACA" if number % 2 else "TAGTCA"
        if both and rng.integers(2):
            site = reverse_complement(site, DNA)
        elif not both and number % 2 == 0:
            site = reverse_complement("TTGACA", DNA)
        at = int(rng.integers(0, 54))
        texts.append(text[:at] + site + text[at + 6 :])
        classes.append(number % 2)
    target = OneClass(classes=("0", "1"))
    baselines = fit_baselines(
        examples(texts[:600], classes[:600]), examples(texts[600:], classes[600:]), target,
        letters=4, first=FIRST, complement=COMPLEMENT,
    )  # fmt: skip
    assert baselines.both_strands is both
    assert not baselines.aligned


def test_a_place_that_decides_is_found_by_position():
    texts = drawn(300, 20, seed=4)
    values = np.array([float(text[7] == "A") for text in texts], dtype=np.float32)
    target = Value(centre=float(values.mean()), spread=float(values.std()))
    baselines = fit_baselines(
        examples(texts[:200], values[:200]), examples(texts[200:], values[200:]), target,
        letters=4, first=FIRST,
    )  # fmt: skip
    assert baselines.aligned
    assert baselines.best.name == "letters by position"
    assert baselines.best.loss < 0.05


def test_labels_have_a_regression_each():
    tokenizer = Tokenizer(PROTEIN)
    texts = ["ACDE" * 3, "FGHI" * 3, "ACDEFGHI"] * 30
    table = np.array([["A" in text, "F" in text] for text in texts], dtype=np.float32)
    part = examples(texts, table, tokenizer)
    baselines = fit_baselines(
        part, part, Labels(classes=("a", "f")), letters=20, first=tokenizer.vocab_size - 20
    )
    assert baselines.positions is None  # lengths differ
    outputs = baselines.kmers.linear(part.__getitems__([0, 1, 2])["tokens"])
    assert ((outputs > 0).numpy() == table[:3]).all()


def test_the_mix_is_that_of_the_lowest_loss():
    truth = torch.arange(100) % 2
    right = torch.stack([1.0 - truth, truth.float()], 1)
    target = OneClass(classes=("0", "1"), smoothing=0.5)
    noise = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    assert choose_mix(noise, 9 * right, truth, target)[0] == 0
    assert choose_mix(9 * right, -right, truth, target) == (1.5, 0.0)
    assert choose_mix(right[:9], -right[:9], truth[:9], target) == (0.5, 0.5)


def test_a_verdict_is_by_the_interval():
    rng, target = np.random.default_rng(0), OneClass(classes=("0", "1"))
    truth = rng.integers(2, size=400)
    right, poor = np.eye(2)[truth], np.eye(2)[rng.integers(2, size=400)]
    comparison = compare(truth, right, poor, target)
    assert (comparison["verdict"], comparison["value"]) == ("beats", 1.0)
    assert comparison["low"] < comparison["gain"] < comparison["high"]
    assert compare(truth, poor, right, target)["verdict"] == "is worse than"
    same = compare(truth, poor, poor, target)
    assert (same["verdict"], same["gain"]) == ("does not beat", 0.0)
