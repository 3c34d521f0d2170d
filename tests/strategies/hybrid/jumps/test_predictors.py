"""Every predictor that has a name keeps what all of them promise."""

import pytest
import torch

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.predictors import PREDICTORS, predictor_named

CPU = torch.device("cpu")


@pytest.fixture(params=PREDICTORS)
def predictor(request):
    return predictor_named(request.param, device=CPU)


def test_it_has_the_name_it_is_asked_by():
    assert [predictor_named(name, device=CPU).name for name in PREDICTORS] == list(PREDICTORS)


def test_a_straight_line_goes_on_whoever_predicts(history_of, randn, predictor):
    slope = [randn(6, 5), randn(4)]
    history = history_of(lambda t: [t * b for b in slope], predictor.needs)
    for delta, b in zip(predictor.predict(history, ahead_steps=25), slope, strict=True):
        assert torch.allclose(delta, 2.5 * b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", ["fp32", "bf16", "svd", "random"])
def test_movements_have_the_shapes_and_signs_of_weights(history_of, randn, predictor, keep):
    rows, columns = randn(12, 1), randn(1, 10)
    history = history_of(
        lambda t: [t * rows @ columns, t * rows[:, 0]], predictor.needs, keep=keep, rank=2
    )
    predictor.observe(history)
    matrix, vector = predictor.predict(history, ahead_steps=10)
    assert (matrix.shape, vector.shape, matrix.dtype) == ((12, 10), (12,), torch.float32)
    assert torch.equal(vector.sign(), rows[:, 0].sign())
    assert float((matrix * (rows @ columns)).sum()) > 0


def test_rest_is_predicted_of_rest(history_of, predictor):
    history = history_of(lambda _: [torch.ones(4, 3), torch.zeros(2)], predictor.needs + 1)
    predictor.observe(history)
    assert not any(delta.any() for delta in predictor.predict(history, ahead_steps=10))


def test_one_snapshot_less_than_it_needs_is_refused(history_of, predictor):
    history = history_of(lambda t: [torch.ones(3) * t], predictor.needs - 1, most=9)
    with pytest.raises(RecipeError, match=f"needs {predictor.needs}, 10 steps apart"):
        predictor.predict(history, ahead_steps=10)


def test_an_unknown_name_is_refused():
    with pytest.raises(RecipeError, match="'rssm' was asked for, and there are line"):
        predictor_named("rssm", device=CPU)
