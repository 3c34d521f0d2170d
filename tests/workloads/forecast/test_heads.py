import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import mean_pinball_loss

from narrowcast.workloads.forecast.heads import make_head, student_quantile
from narrowcast.workloads.forecast.settings import Objective

CPU = torch.device("cpu")


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("loss", "reference"),
    [("mse", torch.nn.MSELoss()), ("mae", torch.nn.L1Loss()), ("huber", torch.nn.HuberLoss())],
)
def test_point_losses_equal_those_of_torch(loss, reference):
    head, numbers, y = make_head(Objective(loss=loss), device=CPU), draw(4, 2, 5, 1), draw(4, 2, 5)
    assert torch.allclose(head.losses(numbers, y).mean(), reference(numbers[..., 0], y))


def test_quantile_loss_is_twice_the_pinball_loss_of_scikit_learn():
    levels = (0.1, 0.5, 0.8)
    head = make_head(Objective(head="quantile", quantiles=levels), device=CPU)
    numbers, y = draw(200, 3), draw(200)
    pinball = [mean_pinball_loss(y, numbers[:, i], alpha=a) for i, a in enumerate(levels)]
    assert head.losses(numbers, y).mean().item() == pytest.approx(2 * np.mean(pinball), rel=1e-5)


def test_quantiles_that_cross_are_put_in_order():
    head = make_head(Objective(head="quantile", quantiles=(0.1, 0.5, 0.9)), device=CPU)
    assert head.quantiles(torch.tensor([3.0, 1.0, 2.0]), (0.1, 0.5, 0.9)).tolist() == [1, 2, 3]
    assert head.quantiles(torch.tensor([0.0, 1.0, 3.0]), (0.3,)).tolist() == [0.5]
    assert head.quantiles(torch.tensor([0.0, 1.0, 3.0]), (0.95,)) is None


def test_student_t_loss_equals_the_likelihood_of_torch():
    head = make_head(Objective(head="student_t"), device=CPU)
    centre, spread, y = draw(4, 2, 1), draw(4, 2, 1).exp(), draw(4, 2, 5)
    numbers = head.restore(draw(4, 2, 5, 3), centre, spread)
    location, scale, freedom = numbers.unbind(-1)
    reference = -torch.distributions.StudentT(freedom, location, scale).log_prob(y)
    assert torch.allclose(head.losses(numbers, y), reference, atol=1e-5)


@pytest.mark.parametrize("level", [0.005, 0.1, 0.5, 0.9, 0.975, 0.999])
def test_student_quantiles_equal_those_of_scipy(level):
    freedom = np.array([2.0, 2.7, 5.0, 17.3, 99.0, 101.0, 1e4])
    np.testing.assert_allclose(
        student_quantile(level, freedom), stats.t.ppf(level, freedom), rtol=1e-4, atol=1e-9
    )


def test_scaling_back_a_forecast_scales_its_distribution():
    head = make_head(Objective(head="student_t"), device=CPU)
    raw, one = draw(1, 1, 5, 3), torch.ones(1, 1, 1)
    plain = head.quantiles(head.restore(raw, 0 * one, one), (0.1, 0.9))
    moved = head.quantiles(head.restore(raw, 7 * one, 3 * one), (0.1, 0.9))
    assert torch.allclose(moved, 7 + 3 * plain, atol=1e-4)
