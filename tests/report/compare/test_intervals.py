import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.report.compare.groups import estimate_difference, estimate_mean, t_quantile

# Two-sided 95 %, as tables of Student's distribution print it.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306,
         9: 2.262, 10: 2.228, 15: 2.131, 20: 2.086, 29: 2.045, 30: 2.042, 120: 1.980}  # fmt: skip


@pytest.mark.parametrize(("freedom", "expected"), TABLE.items())
def test_the_quantile_is_that_of_the_printed_table(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_holds_the_true_mean_in_95_of_100_cases(n):
    draws = torch.randn(4000, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held = sum(
        abs(found.mean) <= found.half_width
        for row in draws.tolist()
        if (found := estimate_mean(row))
    )
    # Four standard deviations of a binomial count.
    assert abs(held - 3800) < 4 * math.sqrt(4000 * 0.95 * 0.05)


def test_the_interval_of_a_difference_holds_the_true_one_at_least_as_often():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3000, 3, generator=generator, dtype=torch.float64)
    b = 5 * torch.randn(3000, 4, generator=generator, dtype=torch.float64)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    held = sum(
        abs(found.mean) <= found.half_width
        for x, y in pairs
        if (found := estimate_difference(x, y))
    )
    assert held > 3000 * 0.95 - 4 * math.sqrt(3000 * 0.95 * 0.05)


def test_one_value_has_no_interval():
    assert estimate_mean([2.0]).half_width is None
    assert estimate_mean([2.0]).low is None
    assert estimate_difference([2.0], [1.0, 1.5]).half_width is None
    assert estimate_mean([]) is None
    assert estimate_difference([], [1.0]) is None


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_the_mean_lies_in_the_middle_of_its_interval(values):
    found = estimate_mean(values)
    assert found.low <= found.mean <= found.high
    assert found.n == len(values)


def test_equal_values_leave_no_doubt():
    assert estimate_mean([2.0, 2.0]).half_width == 0
    assert estimate_difference([2.0, 2.0], [1.0, 1.0]).half_width == 0
