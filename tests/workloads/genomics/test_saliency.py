"""What letters add, for a network whose answer is a sum over letters: known exactly."""

import numpy as np
import pytest
import torch

from narrowcast.workloads.genomics.data.examples import Examples, Ragged
from narrowcast.workloads.genomics.results import REACH, Judged, salient_variants
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.targets import NextToken, OneClass, Value

TOKENIZER = Tokenizer(DNA)
LENGTH, AT = 64, 30
WORTH = torch.randn(
    LENGTH, TOKENIZER.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)


def total(tokens):
    return WORTH[torch.arange(LENGTH), tokens[:, :LENGTH]].sum(1)


def of_alternative(batch):
    return total(batch["alternative"])[:, None]


def of_difference(batch):
    return (total(batch["alternative"]) - total(batch["tokens"]))[:, None]


def examples(*pairs):
    one, two = ([TOKENIZER.encode(text) for text in texts] for texts in zip(*pairs, strict=True))
    return Examples(
        tokens=Ragged.joined(one, np.uint16),
        alternatives=Ragged.joined(two, np.uint16),
        targets=None,
        names=tuple(f"v{n}" for n in range(len(pairs))),
    )


def judged(values):
    return Judged(measured={}, truth=[np.float32(0)] * len(values), predicted=list(values))


def variant(seed):
    text = "".join(np.random.default_rng(seed).choice(list("ACGT"), LENGTH))
    other = next(letter for letter in "ACGT" if letter != text[AT])
    return text, f"{text[:AT]}{other}{text[AT + 1 :]}"


def test_a_letter_adds_what_it_is_worth_beyond_the_others():
    text, other = variant(0)
    (told,) = salient_variants(
        of_alternative, examples((text, other)), judged([1.0]), TOKENIZER, Value(spread=2.0)
    )
    assert told["start"] == AT - REACH
    assert told["alternative"] == other[AT - REACH : AT + REACH + 1]
    ids = TOKENIZER.encode("ACGT")
    expected = []
    for at in range(AT - REACH, AT + REACH + 1):
        own = int(TOKENIZER.encode(other[at])[0])
        rest = [WORTH[at, each].item() for each in ids if each != own]
        expected.append(2.0 * (WORTH[at, own].item() - sum(rest) / 3))
    assert told["adds"] == pytest.approx(expected, abs=5e-6)  # five digits are kept


def test_a_letter_that_both_sequences_have_is_exchanged_in_both():
    (told,) = salient_variants(
        of_difference, examples(variant(1)), judged([1.0]), TOKENIZER, Value()
    )
    # What both have cancels: only the variant itself makes a difference.
    assert np.flatnonzero(told["adds"]).tolist() == [REACH]


def test_the_score_of_a_class_is_its_log_odds():
    def predict(batch):
        others = torch.zeros(len(batch["tokens"]), 2)
        return torch.cat([of_alternative(batch) + 100, others], dim=1)

    found = judged([np.array([0.8, 0.1, 0.1])])
    found.truth[0] = np.int64(2)
    rows, target = examples(variant(2)), OneClass(classes=("a", "b", "c"))
    (told,) = salient_variants(predict, rows, found, TOKENIZER, target)
    assert (told["found"], told["truth"], told["chance"]) == ("a", "c", 0.8)
    # The log-odds of a are its logit less log 2, and what is constant cancels.
    (plain,) = salient_variants(of_alternative, rows, judged([1.0]), TOKENIZER, Value())
    assert told["adds"] == pytest.approx(plain["adds"], abs=1e-5)


def test_insertions_and_sequences_without_a_pair_are_left_out():
    text, other = variant(3)
    shifted = f"{text[:AT]}GATTACA{text[AT:]}"[:LENGTH]
    rows = examples((text, shifted), (text, text), (text, other))
    told = salient_variants(of_alternative, rows, judged([3.0, 2.0, 1.0]), TOKENIZER, Value())
    assert [each["name"] for each in told] == ["v2"]
    alone = Examples(tokens=rows.tokens, targets=None)
    assert salient_variants(of_alternative, alone, judged([1.0]), TOKENIZER, Value()) == []
    assert (
        salient_variants(of_alternative, rows, judged([1.0]), TOKENIZER, NextToken(vocab_size=9))
        == []
    )


def test_of_windows_too_long_to_try_every_letter_there_is_none():
    text = "A" * 2**17
    rows = examples((text, f"C{text[1:]}"))
    assert salient_variants(of_alternative, rows, judged([1.0]), TOKENIZER, Value()) == []
