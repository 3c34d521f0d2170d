"""Measures against scikit-learn's and scipy's, and against counts by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from narrowcast.workloads.genomics import metrics

RNG = np.random.default_rng(0)


def chances_of(rows, classes):
    drawn = RNG.random((rows, classes)) + 0.01
    return drawn / drawn.sum(1, keepdims=True)


def test_two_classes_are_counted_by_hand():
    truth = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    chances = np.array([0.9, 0.8, 0.3, 0.6, 0.2, 0.1, 0.4, 0.05])
    found = metrics.of_classes(truth, np.stack([1 - chances, chances], 1))
    # Two of three are found, and one of five is taken for one.
    tp, fn, fp, tn = 2, 1, 1, 4
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert found["mcc"] == pytest.approx((tp * tn - fp * fn) / math.sqrt(product))
    assert found["accuracy"] == 6 / 8
    assert found["f1"] == pytest.approx((4 / 6 + 8 / 10) / 2)
    # Of 15 pairs of one and the other, 0.3 comes after 0.6 and 0.4.
    assert found["auroc"] == pytest.approx(13 / 15)
    assert found["auprc"] == pytest.approx((1 + 1 + 3 / 5) / 3)


def test_several_classes_are_each_judged_against_the_rest():
    truth, chances = RNG.integers(0, 4, 200), chances_of(200, 4)
    found = metrics.of_classes(truth, chances)
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(truth, chances, multi_class="ovr"))
    one_hot = np.eye(4)[truth]
    assert found["auprc"] == pytest.approx(sk.average_precision_score(one_hot, chances))


def test_a_class_that_does_not_occur_is_not_judged():
    truth, chances = RNG.integers(0, 2, 50), chances_of(50, 3)
    found = metrics.of_classes(truth, chances)
    areas = [sk.roc_auc_score(truth == each, chances[:, each]) for each in (0, 1)]
    assert found["auroc"] == pytest.approx(np.mean(areas))


def test_of_one_class_alone_there_are_no_areas_and_no_warnings():
    found = metrics.of_classes(np.zeros(5, dtype=np.int64), chances_of(5, 2))
    assert found.keys() == {"mcc", "accuracy", "f1"}
    assert found["mcc"] == 0


@pytest.mark.parametrize("labels", [1, 5])
def test_labels_are_judged_one_by_one(labels):
    truth = (RNG.random((80, labels)) < 0.3).astype(np.float32)
    chances = RNG.random((80, labels)).astype(np.float32)
    found = metrics.of_labels(truth, chances)
    each = [(truth[:, at], chances[:, at]) for at in range(labels)]
    f1 = [sk.f1_score(real, score > 0.5, zero_division=0) for real, score in each]
    assert found["f1"] == pytest.approx(np.mean(f1))
    assert found["auprc"] == pytest.approx(
        np.mean([sk.average_precision_score(real, score) for real, score in each])
    )


def test_values_are_judged_as_scipy_does():
    truth, predicted = RNG.normal(size=60), RNG.normal(size=60)
    found = metrics.of_values(truth, predicted)
    assert found["spearman"] == pytest.approx(stats.spearmanr(truth, predicted).statistic)
    assert found["pearson"] == pytest.approx(np.corrcoef(truth, predicted)[0, 1])
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(truth, predicted))
    assert metrics.of_values(truth, np.zeros(60))["spearman"] == 0


def test_letters_count_alike_whichever_row_they_are_in():
    truth = [np.array([0, 1, 1]), np.array([2]), np.array([0, 0])]
    found = metrics.of_letters(truth, [np.array([0, 1, 0]), np.array([2]), np.array([0, 0])])
    assert found["accuracy"] == 5 / 6
    assert found["sequence_accuracy"] == 2 / 3
    flat = np.concatenate(truth)
    assert found["mcc"] == pytest.approx(sk.matthews_corrcoef(flat, [0, 1, 0, 2, 0, 0]))


@settings(max_examples=25)
@given(st.integers(2, 5), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_whatever_is_judged_measures_are_numbers(classes, rows, seed):
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.ones(classes), rows)
    found = metrics.of_classes(rng.integers(0, classes, rows), chances)
    assert np.isfinite(list(found.values())).all()


def test_a_network_that_has_diverged_is_worth_no_number():
    nan = np.full((4, 3), np.nan, dtype=np.float32)
    judged = [
        metrics.of_classes(np.array([0, 1, 2, 0]), nan),
        metrics.of_labels(np.eye(4, 3, dtype=np.float32), nan),
        metrics.of_values(np.arange(4.0), nan[:, 0]),
    ]
    for found in judged:
        assert found
        assert all(math.isnan(value) for value in found.values())


def test_the_precision_of_labels_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth = rng.integers(2, size=(80, 3)) > 0
    truth[:, 2] = True  # a label that all rows have does not count
    chances = rng.integers(12, size=(80, 3)) / 12  # with ties
    expected = [sk.average_precision_score(truth[:, at], chances[:, at]) for at in (0, 1)]
    assert metrics.label_precision(truth, chances) == pytest.approx(np.mean(expected))
