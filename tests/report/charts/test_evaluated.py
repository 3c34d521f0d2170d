import pytest

from narrowcast.report.charts.run_charts import headline_chart, loss_chart
from narrowcast.runs import EvalRecord


@pytest.fixture
def data(run_data_of, classifier, classifier_course):
    return run_data_of(classifier_course, steps=300, task=classifier)


def test_a_headline_that_is_no_loss_has_a_chart_that_says_which_way_is_better(data):
    chart = headline_chart(data)
    assert chart.title == "Evaluated accuracy"
    assert (
        chart.alt
        == "Accuracy, evaluated 3 times: 60.0% at the start, 80.0% at the end; higher is better."
    )
    assert chart.note == "Higher is better."
    assert chart.data[0]["text"] == ["60.0%", "70.0%", "80.0%"]


def test_the_loss_is_evaluated_on_its_own_chart_whatever_the_headline_is(data):
    (evaluated,) = [t for t in loss_chart(data).data if t["name"] == "evaluated loss"]
    assert evaluated["y"] == [2.0, 2.0, 2.0]


def test_a_headline_that_is_the_loss_has_no_second_chart(run_data_of, step):
    assert headline_chart(run_data_of([step(1)], steps=1)) is None
    evals = [EvalRecord(step=1, metrics={"loss": 2.0})]
    assert headline_chart(run_data_of([step(1), *evals], steps=1)) is None


def test_the_chart_spans_the_steps_of_the_run(data):
    low, high = headline_chart(data).layout["xaxis"]["range"]
    assert low < 1
    assert high > 300
