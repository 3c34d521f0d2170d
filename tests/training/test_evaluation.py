import numpy as np
import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.hardware.randomness import capture_randomness
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.evaluation import evaluate
from narrowcast.training.train_loop import train_loop


def test_the_task_is_asked_in_eval_mode_and_every_module_keeps_its_own(ready):
    made = ready()
    model = made.task.model
    model.norm.eval()  # frozen by its owner
    seen = []
    asked = made.task.evaluate
    made = made.but(evaluate=lambda m: seen.append(m.training or m.drop.training) or asked(m))
    evaluate(made.prepared, made.task)
    assert seen == [False]
    assert [model.training, model.drop.training, model.norm.training] == [True, True, False]


def test_an_evaluation_changes_neither_weights_nor_random_numbers(ready):
    made = ready(ema={"decay": 0.5}, steps=5)
    list(train_loop(made.prepared, made.task, made.recipe))
    asked = made.task.evaluate
    info = TaskInfo(metrics=(Metric(name="error"), Metric(name="drawn")))
    made = made.but(evaluate=lambda m: {"drawn": torch.rand(()).item(), **asked(m)}, info=info)

    def state():
        weights = {name: t.clone() for name, t in made.prepared.fp32_state_dict().items()}
        return weights, capture_randomness(torch.device("cpu"))

    before = state()
    evaluate(made.prepared, made.task)
    assert first_difference(before, state()) is None


def test_the_average_of_the_weights_is_judged_beside_them(ready):
    made = ready(steps=30, ema={"decay": 0.5})
    list(train_loop(made.prepared, made.task, made.recipe))
    metrics = evaluate(made.prepared, made.task)
    assert list(metrics) == ["error", "ema_error"]
    with made.prepared.use_ema(), torch.no_grad():
        expected = made.task.evaluate(made.task.model.eval())
    assert metrics["ema_error"] == expected["error"] != metrics["error"]


def test_without_an_average_only_the_weights_are_judged(ready):
    made = ready()
    assert list(evaluate(made.prepared, made.task)) == ["error"]


def test_products_are_rounded_as_in_training(ready):
    """As inside autocast(), and not as in fp32, whose own noise in 37 squares is below 2^-18."""
    wide, narrow = (ready(policy) for policy in ("fp32", "fp8-tensor"))
    a, b = (evaluate(made.prepared, made.task)["error"] for made in (wide, narrow))
    with torch.no_grad(), narrow.prepared.autocast():
        by_hand = narrow.task.evaluate(narrow.prepared.model.eval())["error"]
    assert b == by_hand
    assert abs(a - b) > 2**-18 * a


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"error": 1.0, "recall": 0.5}, r"declares \(error\), got recall\. Add"),
        ({}, "must return error, the first of info"),
    ],
)
def test_metrics_are_those_that_the_task_has_declared(ready, returned, said):
    made = ready().but(evaluate=lambda model: returned)
    with pytest.raises(ConfigError, match=said):
        evaluate(made.prepared, made.task)


def test_a_metric_beside_the_headline_may_be_left_out(ready):
    info = TaskInfo(metrics=(Metric(name="error"), Metric(name="recall", better="higher")))
    made = ready().but(info=info, evaluate=lambda model: {"error": 0.25})
    assert evaluate(made.prepared, made.task) == {"error": 0.25}


@pytest.mark.parametrize("value", [torch.tensor(0.25), np.float32(0.25), 0.25])
def test_a_metric_may_be_a_tensor_or_numpys_number_and_becomes_a_plain_one(ready, value):
    made = ready().but(evaluate=lambda model: {"error": value})
    (found,) = evaluate(made.prepared, made.task).values()
    assert type(found) is float
    assert found == 0.25


@pytest.mark.parametrize("value", [True, "0.25", None, torch.ones(2)])
def test_a_metric_that_is_no_number_is_refused_by_name(ready, value):
    made = ready().but(evaluate=lambda model: {"error": value})
    with pytest.raises(ConfigError, match=r"must return numbers, got error="):
        evaluate(made.prepared, made.task)


def test_an_evaluation_that_returns_no_mapping_is_refused(ready):
    made = ready().but(evaluate=lambda model: 0.25)
    with pytest.raises(ConfigError, match="a dict of numbers by name, got a float"):
        evaluate(made.prepared, made.task)
