"""Linear systems are continued exactly, wherever their fixed point is; growth is not."""

import math

import pytest
import torch

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.dmd import Modes

TURN = 0.9 * torch.tensor(
    [[math.cos(0.7), -math.sin(0.7)], [math.sin(0.7), math.cos(0.7)]], dtype=torch.float64
)
LAW = torch.block_diag(TURN, torch.tensor([[0.6]], dtype=torch.float64))


def orbit(randn, law, size=50):
    """Return weights that follow a linear law in a few random directions about a random point."""
    basis, centre = randn(size, law.shape[0]).double(), randn(size).double()
    start = torch.ones(law.shape[0], dtype=torch.float64)

    def way(time):
        point = centre + basis @ torch.linalg.matrix_power(law, time) @ start
        return [point[:20].view(4, 5).float(), point[20:].float()]

    return way


@pytest.mark.parametrize("intervals", [1, 3, 10])
def test_a_linear_system_goes_on(history_of, randn, intervals):
    way = orbit(randn, LAW)
    deltas = Modes(4).predict(history_of(way, 8), ahead_steps=10 * intervals)
    for delta, now, then in zip(deltas, way(7), way(7 + intervals), strict=True):
        assert torch.allclose(delta, then - now, atol=2e-3 * float((then - now).abs().max()))


def test_part_of_an_interval_of_decay_is_the_law_to_that_power(history_of):
    history = history_of(lambda t: [torch.tensor([5 + 0.5**t, 2 - 0.5**t])], 5)
    (delta,) = Modes(2).predict(history, ahead_steps=5)
    gone = 0.5**4 - 0.5**4.5
    assert torch.allclose(delta, torch.tensor([-gone, gone]), rtol=1e-4)


def test_a_straight_line_goes_on(history_of, randn):
    slope = randn(9)
    (delta,) = Modes(3).predict(history_of(lambda t: [t * slope], 6), ahead_steps=25)
    assert torch.allclose(delta, 2.5 * slope, rtol=1e-4, atol=1e-5)


def test_growth_is_continued_as_a_line(history_of):
    history = history_of(lambda t: [torch.tensor([2.0**t, 0.0])], 6)
    (delta,) = Modes(1).predict(history, ahead_steps=30)
    # The last movement, three times.
    assert torch.allclose(delta, torch.tensor([3 * 2.0**4, 0.0]), rtol=1e-5)


@pytest.mark.parametrize("power", [0, 2, 3])
def test_rest_and_curves_that_are_no_linear_law_give_finite_movements(history_of, randn, power):
    slope = randn(9)
    history = history_of(lambda t: [(t**power) * slope], 6)
    (delta,) = Modes(4).predict(history, ahead_steps=20)
    assert delta.isfinite().all()
    assert power or not delta.any()


def test_weights_that_stopped_stay(history_of, randn):
    slope = randn(9)
    history = history_of(lambda t: [min(t, 2) * slope], 4)
    (delta,) = Modes(4).predict(history, ahead_steps=15)
    assert delta.norm() <= 1e-5 * slope.norm()


def test_too_few_snapshots_are_refused(history_of, randn):
    history = history_of(lambda t: [torch.ones(2) * t], 2)
    with pytest.raises(RecipeError, match="dmd was asked with 2 snapshots and needs 3"):
        Modes().predict(history, ahead_steps=10)
