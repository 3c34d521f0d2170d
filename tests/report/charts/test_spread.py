import html
import json
import math

import pytest

from narrowcast.numerics import FORMATS, BlockFormat, Format, cast_loss
from narrowcast.report.charts.spread import MOST_CHARTS, REACHES, spread_charts, spread_note
from narrowcast.runs import ExponentRecord


def test_the_reach_of_every_format_is_that_of_the_format():
    for name, known in FORMATS.items():
        plain = known.element if isinstance(known, BlockFormat) else known
        assert isinstance(plain, Format)
        reach = REACHES[name]
        assert reach.smallest == math.log2(plain.smallest)
        assert reach.normal == math.log2(plain.smallest_normal)
        assert reach.largest == math.log2(plain.largest_power)
    assert set(REACHES) == set(FORMATS)


def test_the_bars_are_the_shares_of_the_elements(exponents_of, tensor):
    x = tensor(1.0)
    (chart,) = spread_charts([exponents_of(3, "a", "input", "e4m3", x)])
    (bars,) = chart.data
    assert sum(bars["y"]) == pytest.approx(1, abs=1e-5)
    between = ((x.abs() >= 0.5) & (x.abs() < 1)).double().mean().item()
    assert dict(zip(bars["x"], bars["y"], strict=True))[-1] == pytest.approx(between, abs=1e-6)


def test_bars_wear_the_colour_of_what_becomes_of_them(exponents_of, tensor):
    (chart,) = spread_charts([exponents_of(3, "a", "input", "e4m3", tensor(2.0**7))])
    (bars,) = chart.data
    colour = dict(zip(bars["x"], bars["marker"]["color"], strict=True))
    assert colour[8] == "@series"
    assert colour[9] == "@skipped"
    (chart,) = spread_charts([exponents_of(3, "a", "input", "e4m3", tensor(2.0**-7))])
    colour = dict(zip(chart.data[0]["x"], chart.data[0]["marker"]["color"], strict=True))
    # More than half the smallest value, 2**-9, still rounds up to it.
    assert (colour[-11], colour[-10], colour[-7], colour[-6]) == (
        "@skipped",
        "@evaluated",
        "@evaluated",
        "@series",
    )
    assert "below the format" in chart.note


def test_the_range_behind_the_bars_is_the_format_s(exponents_of, tensor):
    (chart,) = spread_charts([exponents_of(3, "a", "input", "e4m3", tensor(8.0))])
    normal, subnormal = chart.layout["shapes"]
    assert (normal["x0"], normal["x1"]) == (-6.5, 8.5)
    assert (subnormal["x0"], subnormal["x1"]) == (-10.5, -6.5)
    assert "all values within the range of the format" in chart.note


def test_a_wide_format_does_not_flatten_the_bars(exponents_of, tensor):
    (chart,) = spread_charts([exponents_of(3, "a", "input", "bf16", tensor(1.0))])
    low, high = chart.layout["xaxis"]["range"]
    assert high - low < 30
    assert all(low - 1 <= s["x0"] and s["x1"] <= high + 1 for s in chart.layout["shapes"])


def test_the_worst_histogram_of_each_tensor_is_drawn_the_worst_first(exponents_of, tensor):
    records = [
        exponents_of(1, "c", "input", "e4m3", tensor(1.0)),
        exponents_of(1, "b", "input", "e4m3", tensor(2.0**10)),
        exponents_of(1, "a", "input", "e4m3", tensor(2.0**12)),
        exponents_of(2, "a", "input", "e4m3", tensor(1.0)),
        exponents_of(3, "c", "input", "e4m3", tensor(1.0)),
    ]
    charts = spread_charts(records)
    assert [chart.title for chart in charts] == ["a · input", "b · input", "c · input"]
    steps = [chart.note.split(":")[0] for chart in charts]
    assert steps == ["e4m3, step 1", "e4m3, step 1", "e4m3, step 3"]


def test_a_tensor_that_lost_digits_comes_before_one_that_lost_nothing(exponents_of, tensor):
    records = [
        exponents_of(1, "well", "input", "fp16", tensor(1.0)),
        exponents_of(1, "small", "input", "fp16", tensor(2.0**-15)),
    ]
    assert [chart.title for chart in spread_charts(records)] == ["small · input", "well · input"]


def test_more_than_a_few_are_counted(exponents_of, tensor):
    records = [exponents_of(1, f"m{i}", "input", "e4m3", tensor(1.0)) for i in range(15)]
    assert len(spread_charts(records)) == MOST_CHARTS
    assert spread_note(records) == "6 of 15 tensors are shown. The rest are in records.jsonl."
    assert spread_note(records[:6]) == ""


@pytest.mark.parametrize("counts", [(), (0, 0)])
def test_a_tensor_of_zeros_has_no_histogram(counts):
    record = ExponentRecord(
        step=1, module="a", role="input", format="e4m3", lowest=0, counts=counts
    )
    assert spread_charts([record]) == []


def test_a_format_nobody_knows_has_bars_without_a_range(exponents_of, tensor):
    hostile = "<b>fp3</b>"
    (chart,) = spread_charts([exponents_of(1, "a", "input", hostile, tensor(1.0))])
    assert chart.layout["shapes"] == []
    assert json.dumps(chart.data, allow_nan=False)
    assert not any("<" in html.unescape(text) for text in chart.data[0]["text"])


@pytest.mark.parametrize("target", ["e4m3", "e5m2", "fp16"])
def test_what_is_told_to_be_below_a_format_is_what_the_format_flushes(target, exponents_of, tensor):
    x = tensor(FORMATS[target].smallest, seed=3)
    (chart,) = spread_charts([exponents_of(1, "a", "input", target, x)])
    bars = zip(chart.data[0]["y"], chart.data[0]["marker"]["color"], strict=True)
    lost = sum(y for y, colour in bars if colour == "@skipped")
    assert lost == pytest.approx(cast_loss(x, FORMATS[target]).flush_rate, abs=1e-5)
