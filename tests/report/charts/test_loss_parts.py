import json
import math
import re
from importlib.resources import files

import pytest

from narrowcast.report.charts.run_charts import parts_chart


@pytest.fixture
def chart(run_data_of, classifier, classifier_course):
    return parts_chart(run_data_of(classifier_course, steps=300, task=classifier))


def test_each_part_has_a_line_with_its_name_in_the_legend(chart):
    assert [trace["name"] for trace in chart.data] == ["reconstruction", "sparsity"]
    assert chart.layout["showlegend"]


def test_a_sentence_says_what_the_lines_show(chart):
    assert chart.alt.startswith("Loss parts over 300 steps: reconstruction ")
    assert "; sparsity 0.2510 at the start, 0.5500 at the end." in chart.alt


def test_lines_differ_in_more_than_their_colour(chart):
    assert len({trace["line"]["dash"] for trace in chart.data}) == 2


def test_every_colour_is_in_the_style_sheet_for_light_and_for_dark(chart):
    style = files("narrowcast.report").joinpath("templates", "style.css").read_text()
    for name in re.findall(r'"@(\w+)"', json.dumps(chart.data)):
        assert style.count(f"--{name}:") == 2


def test_a_loss_of_one_piece_has_no_chart(run_data_of, step):
    assert parts_chart(run_data_of([step(1), step(2)], steps=2)) is None


def test_a_part_that_some_steps_lack_or_that_is_not_finite_is_drawn_with_gaps(run_data_of, step):
    given = [{"a": 1.0}, {}, {"a": math.inf}, {"a": 2.0, "b": math.nan}]
    records = [step(n, loss_parts=parts) for n, parts in enumerate(given, 1)]
    (line,) = parts_chart(run_data_of(records, steps=4)).data
    assert line["y"] == [1.0, None, None, 2.0]
