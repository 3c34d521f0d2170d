import math

import pytest

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs import Metric, TaskInfo
from narrowcast.runs.strict_json import dumps, loads

ACCURACY = Metric(name="accuracy", better="higher", text=".1%")
INFO = TaskInfo(
    unit="series",
    plural="series",
    metrics=(ACCURACY, Metric(name="loss")),
    loss_parts=("fit", "penalty"),
)


def test_what_a_task_says_survives_its_file():
    assert TaskInfo.from_json(loads(dumps(INFO.to_json()))) == INFO


def test_the_unit_has_a_plural():
    assert (TaskInfo(unit="token").units, INFO.units) == ("tokens", "series")


def test_a_metric_knows_which_way_is_better_and_how_it_is_printed():
    assert ACCURACY.is_better(0.9, than=0.8)
    assert not ACCURACY.is_better(math.nan, than=0.8)
    assert Metric(name="loss").is_better(0.8, than=0.9)
    assert ACCURACY.written(0.912) == "91.2%"
    assert ACCURACY.written(math.nan) == "nan"


def test_the_metric_of_averaged_weights_is_judged_as_the_metric():
    assert INFO.metric("ema_accuracy") == ACCURACY


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="must have different names"):
        TaskInfo(metrics=(ACCURACY, ACCURACY))


@pytest.mark.parametrize("data", [None, [], {}, {"metrics": 3}, {"metrics": [{"nam": "x"}]}])
def test_a_damaged_file_is_said_to_be_so(data):
    with pytest.raises(CheckpointError, match=r"task\.json is damaged"):
        TaskInfo.from_json(data)


@pytest.mark.parametrize("text", ["", "d", "1000000000g", ".4", "{0}", ".100f", 4])
def test_a_text_that_is_no_short_format_of_a_number_is_refused(text):
    with pytest.raises(ConfigError, match=r"a format such as \.4g|must be 'lower'"):
        Metric(name="x", text=text)


def test_a_direction_is_one_of_two():
    with pytest.raises(ConfigError, match="must be 'lower' or 'higher', got 'up'"):
        Metric(name="x", better="up")


def test_the_first_metric_must_be_ranked():
    with pytest.raises(ConfigError, match="'alive' with ranked=False"):
        TaskInfo(metrics=(Metric(name="alive", ranked=False), Metric(name="loss")))


def test_how_a_metric_is_printed_is_no_part_of_what_a_run_is_judged_by():
    other = TaskInfo(
        unit="series",
        plural="serieses",
        metrics=(Metric(name="accuracy", better="higher", text=".3f"), Metric(name="loss")),
        loss_parts=("fit", "penalty"),
    )
    assert other.judged_by == INFO.judged_by
    assert TaskInfo(unit="series", plural="series").judged_by != INFO.judged_by


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"unit": "images"}, "unit must be singular"),
        ({"loss_parts": "digit"}, r"Write loss_parts=\(…,\)"),
        ({"metrics": ACCURACY}, r"Write metrics=\(…,\)"),
        ({"metrics": ("accuracy",)}, "got 'accuracy'"),
        ({"metrics": (Metric(name="ema_loss"),)}, "Choose another name"),
    ],
)
def test_what_a_task_says_of_itself_is_refused_where_it_means_something_else(settings, why):
    with pytest.raises(ConfigError, match=why):
        TaskInfo(**settings)
