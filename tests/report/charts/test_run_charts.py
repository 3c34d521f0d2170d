import html
import json
import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from narrowcast.report.charts.run_charts import (
    headline_chart,
    loss_chart,
    scale_chart,
    small_charts,
)
from narrowcast.runs import EvalRecord


@pytest.fixture
def data(run_data_of, course):
    return run_data_of(course(3000, eval_every=300), steps=3000)


def traces(chart):
    return {trace["name"]: trace for trace in chart.data}


def test_the_loss_chart_has_at_most_2000_training_points_every_evaluation_and_every_skip(data):
    found = traces(loss_chart(data))
    assert len(found["training"]["x"]) <= 2000
    assert found["evaluated loss"]["x"] == [r.step for r in data.evals]
    skipped = {r.step for r in data.steps if not r.applied}
    assert skipped
    reach = found["skipped"]["error_x"]["array"]
    marked = {
        n
        for first, more in zip(found["skipped"]["x"], reach, strict=True)
        for n in range(first, first + more + 1)
    }
    assert marked == skipped


def test_hovering_over_a_skip_shows_its_reason_and_none_of_its_markup(run_data_of, step):
    why = '<b>blocks.0</b> & "more" ' + "word " * 20 + "end"
    found = traces(
        loss_chart(run_data_of([step(1), step(2, applied=False, skip_reason=why)], steps=2))
    )
    (text,) = found["skipped"]["text"]
    assert set(re.findall(r"<[^>]*>", text)) <= {"<br>"}
    said = html.unescape(text.replace("<br>", " "))
    assert said == f"skipped: {why}"


def test_the_name_of_a_metric_is_not_read_as_markup(run_data_of, step):
    evals = [EvalRecord(step=1, metrics={"<b>loss</b>": 1.0})]
    names = traces(headline_chart(run_data_of([step(1), *evals], steps=1)))
    assert "&lt;b&gt;loss&lt;/b&gt;" in names


def test_every_colour_of_a_chart_is_in_the_style_sheet(data):
    text = json.dumps([(c.data, c.layout) for c in (loss_chart(data), scale_chart(data))])
    style = files("narrowcast.report").joinpath("templates", "style.css").read_text()
    used = set(re.findall(r'"@([a-z]+)"', text))
    assert used
    assert used <= set(re.findall(r"--([a-z-]+):", style))


def test_losses_that_are_not_finite_are_gaps_and_strict_json(run_data_of, step):
    losses = [3.0, math.nan, math.inf, 2.0]
    chart = loss_chart(run_data_of([step(n, loss=y) for n, y in enumerate(losses, 1)], steps=4))
    assert chart.data[0]["y"] == [3.0, None, None, 2.0]
    assert json.dumps(chart.data, allow_nan=False)
    assert chart.note == "The loss was not finite in 2 steps, shown as gaps in the line."
    assert "not finite in 2 steps" in chart.alt


def test_a_rare_spike_is_cut_off_and_told(run_data_of, step):
    losses = [5 / n + 1 for n in range(1, 301)]
    losses[200] = 1e9
    chart = loss_chart(run_data_of([step(n, loss=y) for n, y in enumerate(losses, 1)], steps=300))
    low, high = chart.layout["yaxis"]["range"]
    assert low < min(losses)
    assert 6 < high < 10
    assert chart.note == "1 step above the frame. Double-click to show all."


def test_the_high_losses_of_the_first_steps_stay_in_the_frame(data):
    assert "range" not in loss_chart(data).layout["yaxis"]


def test_a_negative_loss_has_no_logarithmic_axis(run_data_of, step):
    data = run_data_of([step(1, loss=-1.0), step(2, loss=2.0)], steps=2)
    assert not loss_chart(data).log_switch
    assert loss_chart(run_data_of([step(1, loss=1.0)], steps=1)).log_switch


def test_the_scale_axis_is_ticked_at_powers_of_two_that_hold_every_value(data):
    chart = scale_chart(data)
    axis = chart.layout["yaxis"]
    assert axis["type"] == "log"
    assert all(math.log2(tick).is_integer() for tick in axis["tickvals"])
    assert len(axis["tickvals"]) <= 7
    low, high = axis["range"]
    assert all(10**low < r.loss_scale < 10**high for r in data.steps)


def test_every_overflow_is_marked_on_the_scale_it_happened_at(data):
    found = traces(scale_chart(data))["skipped"]
    expected = [(r.step, r.loss_scale) for r in data.steps if not r.applied]
    assert list(zip(found["x"], found["y"], strict=True)) == expected


@pytest.mark.parametrize("initial", [1e30, 2.0**127, 1.0, 3.0])
def test_scales_of_any_size_can_be_drawn(initial, run_data_of, step):
    records = [step(n, loss_scale=initial / 2**n) for n in range(1, 90)]
    chart = scale_chart(run_data_of(records, steps=89))
    assert len(chart.layout["yaxis"]["tickvals"]) <= 7


def test_a_scale_of_one_throughout_is_not_worth_a_chart(run_data_of, step):
    assert scale_chart(run_data_of([step(n, loss_scale=1.0) for n in (1, 2)], steps=2)) is None


def test_only_what_was_measured_gets_a_small_chart(run_data_of, step):
    names = [chart.name for chart in small_charts(run_data_of([step(1), step(2)], steps=2))]
    assert names == ["norm", "lr", "speed"]
    measured = run_data_of([step(1, lost_updates=0.25)], steps=1)
    assert "lost" in [chart.name for chart in small_charts(measured)]


def test_lost_updates_measured_now_and_then_are_joined_into_a_line(run_data_of, step):
    records = [step(n, lost_updates=n / 100 if n % 5 == 0 else None) for n in range(1, 21)]
    (chart,) = [c for c in small_charts(run_data_of(records, steps=20)) if c.name == "lost"]
    assert chart.data[0]["x"] == [5, 10, 15, 20]
    assert chart.data[0]["y"] == [0.05, 0.1, 0.15, 0.2]


def test_all_charts_span_the_same_steps(data):
    first = replace(data.steps[0], lost_updates=None)
    data = replace(data, steps=(first, *data.steps[1:]))
    charts = [loss_chart(data), scale_chart(data), *small_charts(data)]
    assert len(charts) == 6
    assert len({tuple(chart.layout["xaxis"]["range"]) for chart in charts}) == 1


def test_an_evaluation_that_is_no_loss_is_not_drawn_among_losses(run_data_of, step):
    evals = [EvalRecord(step=1, metrics={"crps": 0.5})]
    data = run_data_of([step(1), *evals], steps=1)
    assert list(traces(loss_chart(data))) == ["training"]
    assert headline_chart(data).title == "Evaluated crps"
