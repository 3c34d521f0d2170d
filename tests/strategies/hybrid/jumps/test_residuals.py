"""Residuals say how far and in which direction a prediction was wrong."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.strategies.hybrid.jumps.residuals import (
    ErrorStatistics,
    LayerResidual,
    Residual,
    Residuals,
    compress,
    measure,
)


def residual(step=0, *, error=0.0, features=(1.0, 0.0)):
    return Residual(step, 10, (LayerResidual(1.0, 0.5, error),), features)


def test_magnitude_and_cosine_are_those_of_torch(randn):
    predicted, actual = [randn(4, 5), randn(7)], [randn(4, 5), randn(7)]
    for found, p, a in zip(measure(predicted, actual), predicted, actual, strict=True):
        cosine = torch.nn.functional.cosine_similarity(p.flatten(), a.flatten(), dim=0)
        assert found.magnitude == pytest.approx(float((a - p).norm()), rel=1e-5)
        assert found.cosine == pytest.approx(float(cosine), abs=1e-5)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2, -1.0])
def test_the_scale_error_is_signed_and_brings_a_prediction_home(randn, factor):
    predicted = randn(9)
    (found,) = measure([predicted], [factor * predicted])
    assert found.scale_error == pytest.approx(factor - 1, abs=1e-5)
    assert found.cosine == pytest.approx(1.0 if factor > 0 else -1.0, abs=1e-5)


def test_no_movement_is_no_nan():
    rest, move = torch.zeros(3), torch.ones(3)
    assert measure([rest, rest, move], [rest, move, rest]) == (
        LayerResidual(0.0, 0.0, 0.0),
        LayerResidual(pytest.approx(3**0.5), 0.0, 0.0),
        LayerResidual(pytest.approx(3**0.5), 0.0, -1.0),
    )


def test_the_oldest_of_a_thousand_gives_way():
    kept = Residuals()
    for step in range(1003):
        kept.add(residual(step))
    assert len(kept) == 1000
    assert kept.held[0].step == 3
    assert kept.statistics.count == 1003


@given(errors=st.lists(st.floats(-10, 10), min_size=2, max_size=50))
def test_running_statistics_are_those_of_the_list(errors):
    found = ErrorStatistics()
    for error in errors:
        found = found.after(error)
    assert found.mean == pytest.approx(statistics.fmean(errors), abs=1e-9)
    assert found.std == pytest.approx(statistics.stdev(errors), abs=1e-7)
    assert found.mean_absolute == pytest.approx(statistics.fmean(map(abs, errors)), abs=1e-9)


def test_the_most_similar_are_those_of_the_smallest_angle():
    kept = Residuals()
    for step, features in enumerate([(1.0, 0.0), (0.0, 3.0), (1.0, 1.0), (-2.0, 0.0)]):
        kept.add(residual(step, features=features))
    assert [r.step for r in kept.most_similar((0.1, 0.09), 3)] == [2, 0, 1]


def test_of_equal_ones_the_newer_comes_first_and_other_lengths_do_not_match():
    kept = Residuals()
    for step, features in enumerate([(1.0, 0.0), (1.0,), (1.0, 0.0), (0.0, 0.0)]):
        kept.add(residual(step, features=features))
    assert [r.step for r in kept.most_similar((2.0, 0.0), 9)] == [2, 0, 3]
    assert Residuals().most_similar((1.0,)) == []


def test_only_residuals_of_the_predictor_that_is_asked_match():
    kept = Residuals()
    for step, predictor in enumerate(["line", "dmd", "line"]):
        kept.add(replace(residual(step), predictor=predictor))
    assert [r.step for r in kept.most_similar((1.0, 0.0), predictor="line")] == [2, 0]


def test_a_matrix_of_rank_one_is_compressed_exactly(randn):
    column, row = randn(8, 1), randn(1, 6)
    found = compress(column @ row, generator=torch.Generator().manual_seed(0))
    assert found.left.numel() + found.right.numel() == 14
    assert torch.allclose(found.whole(), column @ row, atol=2**-20 * 8)


def test_residuals_survive_json():
    kept, again = Residuals(), Residuals()
    for step in range(3):
        kept.add(residual(step, error=0.1 * step))
    again.load_state_dict(json.loads(json.dumps(kept.state_dict())))
    assert again.held == kept.held
    assert again.statistics == kept.statistics
