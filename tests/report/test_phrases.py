import math

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from narrowcast.report.phrases import (
    count,
    duration,
    large,
    policies,
    said,
    scale,
    share,
    size,
    value,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (count(1, "step"), "1 step"),
        (count(0, "step"), "0 steps"),
        (count(12345, "step"), "12,345 steps"),
        (large(999), "999"),
        (large(999.6), "1.00 k"),
        (large(1_049_600), "1.05 M"),
        (large(999_600), "1.00 M"),
        (size(512), "512 B"),
        (size(4 * 2**20), "4.00 MiB"),
        (size(143 * 2**30), "143 GiB"),
        (duration(0.0123), "12 ms"),
        (duration(9.96), "10 s"),
        (duration(59.6), "1 min 0 s"),
        (duration(92), "1 min 32 s"),
        (duration(3600 * 5 + 60), "5 h 1 min"),
        (duration(86400 * 3 + 3600), "3 d 1 h"),
        (value(2.31449), "2.314"),
        (value(0.0), "0"),
        (value(-12.5), "−12.50"),
        (value(123456.7), "123,457"),
        (value(3.2e-5), "3.20 × 10⁻⁵"),
        (value(-4e9), "−4.00 × 10⁹"),
        (value(math.nan), "not a number"),
        (value(-math.inf), "−infinite"),
        (scale(1.0), "1"),
        (scale(65536.0), "65,536"),
        (scale(2.0**24), "2²⁴"),
        (scale(2.0**-3), "2⁻³"),
        (scale(3.0), "3"),
        (scale(0.3), "0.3000"),
        (scale(math.inf), "infinite"),
        (share(1, 3), "33.3 %"),
        (share(1, 1), "100 %"),
        (share(0, 7), "0 %"),
        (share(1, 0), "–"),
    ],
)
def test_numbers_read_as_a_person_would_write_them(written, expected):
    assert written == expected


@given(whole=integers(2, 10**9), data=integers(1, 10**9))
def test_a_share_that_is_neither_none_nor_all_never_reads_as_either(whole, data):
    part = 1 + data % (whole - 1)
    assert share(part, whole) not in {"0 %", "100 %", "0.0 %"}


@given(floats())
def test_every_float_has_a_text_and_none_of_them_is_longer_than_a_cell(x):
    texts = [value(x), large(x), size(x), scale(x)]
    texts += [duration(x)] if not x < 0 else []
    assert all(0 < len(text) <= 24 for text in texts)


@given(floats(min_value=1e-3, max_value=9e5))
def test_a_value_is_right_to_four_significant_digits(x):
    assert math.isclose(float(value(x).replace(",", "")), x, rel_tol=0.5e-3)


def test_a_run_with_phases_is_called_by_their_policies_in_order():
    phases = [{"policy": "fp32", "until": 3}, {"policy": None}, {"policy": "fp8-row"}]
    assert policies("bf16", phases) == "fp32 → bf16 → fp8-row"
    assert policies("bf16", []) == policies("bf16", None) == policies("bf16", "odd") == "bf16"


def test_a_measure_is_said_in_words_and_what_it_is_of_by_its_own_name():
    assert said("identity_error") == "identity error"
    assert said("mean_l0/layers.0.mlp_in/pre_norm") == "mean l0/layers.0.mlp_in/pre_norm"
