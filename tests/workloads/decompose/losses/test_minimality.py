"""Minimality by hand, and the ends of its annealing."""

import math
from fractions import Fraction

import pytest
import torch

from narrowcast.workloads.decompose.losses.penalties import Minimality, SmoothL0

UPPER = [
    torch.tensor([[[0.5, 0.0], [1.0, 0.25]]], dtype=torch.float64),  # a site of two components
    torch.tensor([[[1.0], [0.5]]], dtype=torch.float64),  # and one of one
]


def at(numbers, progress=0.0, upper=UPPER):
    return numbers(upper=upper, progress=torch.tensor(progress, dtype=torch.float64))


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1.0, Fraction(3, 4) + Fraction(1, 8) + Fraction(3, 4)),
        (2.0, Fraction(5, 8) + Fraction(1, 32) + Fraction(5, 8)),
    ],
)
def test_powers_are_meant_over_rows_and_summed_over_components_and_sites(numbers, p, expected):
    found = Minimality(coefficient=1.0, p=p)(at(numbers))
    assert found.item() == pytest.approx(float(expected), rel=1e-11)  # 1e-12 is added to each


def test_the_frequency_term_presses_on_what_many_rows_need(numbers):
    means = (3 / 4, 1 / 8, 3 / 4)
    expected = sum(mu + 0.5 * mu * math.log2(1 + 2 * mu) for mu in means)  # two rows
    found = Minimality(coefficient=1.0, beta=0.5)(at(numbers))
    assert found.item() == pytest.approx(expected, rel=1e-11)
    fixed = sum(mu + 0.5 * mu * math.log2(1 + 100 * mu) for mu in means)
    found = Minimality(coefficient=1.0, beta=0.5, reference_rows=100)(at(numbers))
    assert found.item() == pytest.approx(fixed, rel=1e-11)


@pytest.mark.parametrize(
    ("progress", "p"), [(0.0, 2.0), (0.25, 2.0), (0.5, 1.25), (0.75, 0.5), (1.0, 0.5)]
)
def test_p_goes_in_a_straight_line_between_the_shares_of_the_run(numbers, progress, p):
    annealed = Minimality(coefficient=1.0, p=2.0, p_final=0.5, anneal_from=0.25, anneal_to=0.75)
    found = annealed(at(numbers, progress))
    expected = Minimality(coefficient=1.0, p=p)(at(numbers))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("progress", "gamma"), [(0.0, 1.0), (0.5, 0.75), (1.0, 0.5)])
def test_smooth_l0_counts_importances_above_gamma(numbers, progress, gamma):
    loss = SmoothL0(coefficient=1.0, gamma=1.0, gamma_final=0.5)
    found = loss(at(numbers, progress))
    values = [u for site in UPPER for u in site.flatten().tolist()]
    expected = sum(u * u / (u * u + gamma * gamma) for u in values) / 2
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_at_its_last_gamma_smooth_l0_is_nearly_the_number_of_important_components(numbers):
    found = SmoothL0(coefficient=1.0)(at(numbers, 1.0))
    assert found.item() == pytest.approx(5 / 2, rel=0.01)  # five of six are above 0, in two rows


def test_an_importance_of_zero_has_a_finite_slope_below_power_one(numbers):
    upper = [torch.zeros(1, 2, 1, dtype=torch.float64, requires_grad=True)]
    Minimality(coefficient=1.0, p=0.4)(at(numbers, upper=upper)).sum().backward()
    assert upper[0].grad.isfinite().all()


@pytest.mark.parametrize("p_final", [None, 0.3])
def test_an_importance_that_dips_below_zero_weighs_nothing(numbers, p_final):
    upper = [torch.tensor([[[-0.03]]], dtype=torch.float64, requires_grad=True)]
    found = Minimality(coefficient=1.0, p=0.5, p_final=p_final)(at(numbers, upper=upper)).sum()
    found.backward()
    assert 0 <= found.item() < 1e-5
    assert not upper[0].grad.any()
