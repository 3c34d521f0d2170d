"""Losses against torch's own on rows without padding, and what is kept of each row."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from narrowcast.workloads.genomics.targets import EveryLetter, Labels, NextToken, OneClass, Value

ROWS, LENGTH, CLASSES = 3, 7, 4
LENGTHS = (7, 4, 2)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def batch():
    """Three rows of unequal length, filled up."""
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 5 + 1
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    return {"tokens": tokens * mask, "mask": mask}


def letters(batch):
    classes = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % CLASSES
    return {**batch, "targets": classes.masked_fill(~batch["mask"], -100)}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_letters_is_the_mean_over_those_that_are_real(batch, smoothing):
    batch, found = letters(batch), randn(ROWS, LENGTH, CLASSES)
    target = EveryLetter(classes=("a", "b", "c", "d"), smoothing=smoothing)
    real = torch.cat([found[row, :end] for row, end in enumerate(LENGTHS)])
    wanted = torch.cat([batch["targets"][row, :end] for row, end in enumerate(LENGTHS)])
    expected = F.cross_entropy(real, wanted, label_smoothing=smoothing)
    torch.testing.assert_close(target.loss(found, batch), expected)
    assert int(target.count(batch)) == sum(LENGTHS)
    assert [len(row) for row in target.truth(batch)] == list(LENGTHS)
    assert np.concatenate(target.predicted(found, batch)).tolist() == real.argmax(-1).tolist()


def test_the_loss_of_the_next_token_is_that_of_each_row_by_itself(batch):
    found, target = randn(ROWS, LENGTH, 6), NextToken(vocab_size=6)
    pairs = [
        (found[row, : end - 1], batch["tokens"][row, 1:end]) for row, end in enumerate(LENGTHS)
    ]
    scores, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    torch.testing.assert_close(target.loss(found, batch), F.cross_entropy(scores, wanted))
    assert int(target.count(batch)) == sum(LENGTHS) - ROWS
    right = (scores.argmax(-1) == wanted).double().mean().item()
    measured = target.measured(target.truth(batch), target.predicted(found, batch))
    assert measured["letter_accuracy"] == pytest.approx(right)


def test_unknown_letters_are_neither_learnt_nor_judged(batch):
    found, target = randn(ROWS, LENGTH, 6), NextToken(vocab_size=6, unknown=3)
    wanted = torch.cat([batch["tokens"][row, 1:end] for row, end in enumerate(LENGTHS)])
    scores = torch.cat([found[row, : end - 1] for row, end in enumerate(LENGTHS)])
    known = wanted != 3
    assert 0 < known.sum() < len(known)
    expected = F.cross_entropy(scores[known], wanted[known])
    torch.testing.assert_close(target.loss(found, batch), expected)
    assert int(target.count(batch)) == int(known.sum())
    assert np.concatenate(target.truth(batch)).tolist() == wanted[known].tolist()
    chosen = scores[known].argmax(-1)
    assert np.concatenate(target.predicted(found, batch)).tolist() == chosen.tolist()


@pytest.mark.parametrize("make", [letters, dict])
def test_what_fills_a_batch_up_changes_nothing(batch, make):
    target = EveryLetter(classes=tuple("abcd")) if make is letters else NextToken(vocab_size=6)
    width = CLASSES if make is letters else 6
    batch, found = make(batch), randn(ROWS, LENGTH, width)
    fillers = {"tokens": 0, "mask": False, "targets": -100}
    wider = {key: F.pad(value, (0, 5), value=fillers[key]) for key, value in batch.items()}
    loss = target.loss(F.pad(found, (0, 0, 0, 5), value=1e4), wider)
    torch.testing.assert_close(loss, target.loss(found, batch))


def test_a_batch_without_any_label_has_no_loss_and_no_gradient(batch):
    found = randn(ROWS, LENGTH, CLASSES).requires_grad_()
    unlabelled = {**batch, "targets": torch.full((ROWS, LENGTH), -100)}
    loss = EveryLetter(classes=tuple("abcd")).loss(found, unlabelled)
    loss.backward()
    assert loss.item() == 0
    assert not found.grad.any()


def test_losses_of_sequences_are_torchs():
    batch = {"tokens": torch.ones(5, 2), "targets": torch.tensor([0, 3, 1, 1, 2])}
    found = randn(5, CLASSES)
    smooth = OneClass(classes=tuple("abcd"), smoothing=0.1)
    # Smoothing by hand: a tenth of the truth is spread over all classes.
    spread = 0.9 * F.one_hot(batch["targets"], CLASSES) + 0.1 / CLASSES
    expected = -(spread * found.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(smooth.loss(found, batch), expected)
    np.testing.assert_allclose(np.stack(smooth.predicted(found, batch)).sum(1), 1, rtol=1e-6)
    several = {**batch, "targets": (randn(5, CLASSES) > 0).float()}
    chances = found.sigmoid()
    expected = -torch.where(several["targets"] > 0, chances, 1 - chances).log().mean()
    torch.testing.assert_close(Labels(classes=tuple("abcd")).loss(found, several), expected)


def test_a_value_is_learnt_with_mean_0_and_told_in_its_own_unit():
    values = torch.tensor([10.0, 12.0, 17.0])
    target = Value(centre=values.mean().item(), spread=values.std(correction=0).item())
    batch, found = {"tokens": torch.ones(3, 2), "targets": values}, randn(3, 1)
    standard = (values - 13) / math.sqrt((9 + 1 + 16) / 3)
    expected = F.mse_loss(found[:, 0], standard)
    torch.testing.assert_close(target.loss(found, batch), expected)
    # A network that is right says the values themselves.
    np.testing.assert_allclose(target.predicted(standard[:, None], batch), values, rtol=1e-6)
