"""What `benchmarks/hybrid.py` trains and counts is what its methods and its table say."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowcast.strategies.hybrid.report import WHICH_WHEN

pytest.importorskip("sklearn")
pytest.importorskip("scipy")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COSINE = {0.5: [2.0, 2.2], 1.0: [1.0, 1.2], 2.0: [0.5, 0.7]}


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from hybrid_studies import methods, plan, readouts, savings, tasks

    return methods, plan, readouts, savings, tasks


@pytest.fixture
def line(studies):
    """A task of one weight and a batch that does not change: the loss is its square."""
    *_, tasks = studies

    def train(generator):
        while True:
            yield torch.ones(1, 1), torch.zeros(1, 1)

    part = (torch.ones(4, 1), torch.zeros(4, 1))
    return tasks.Task(
        name="line",
        steps=40,
        batch=1,
        lr=0.1,
        make=lambda: nn.Linear(1, 1, bias=False),
        loss=nn.functional.mse_loss,
        train=train,
        selection=part,
        report=part,
        optimizer="sgd",
    )


def test_a_method_as_good_as_cosine_at_a_budget_saves_that_budget(studies):
    *_, savings, _ = studies
    for share, losses in COSINE.items():
        found = savings.saving(COSINE, losses, [1.0, 1.0])
        assert found.mean == pytest.approx(share)
        assert found.half == pytest.approx(0.0, abs=1e-9)


def test_a_budget_between_two_is_found_on_the_line_through_their_logarithms(studies):
    *_, savings, _ = studies
    share, sign = savings.curve_of(COSINE).budget(1.6)
    assert (share, sign) == (pytest.approx(math.sqrt(0.5)), "")


@pytest.mark.parametrize(("loss", "expected"), [(0.1, (2.0, ">")), (9.0, (0.5, "<"))])
def test_a_loss_outside_of_the_grid_is_told_as_such_and_not_extrapolated(studies, loss, expected):
    *_, savings, _ = studies
    assert savings.curve_of(COSINE).budget(loss) == expected


def test_a_longer_budget_that_did_worse_is_pooled_with_its_neighbour(studies):
    *_, savings, _ = studies
    curve = savings.curve_of({0.5: [3.0], 1.0: [1.0], 2.0: [2.0]})
    assert curve.losses == (3.0, 1.5, 1.5)


def test_primal_averaging_takes_gradients_between_the_answer_and_the_moved_weights(studies, line):
    methods, *_ = studies
    way = methods.Way(name="B", schedule="constant", kind="primal")
    flat = methods.Flat(line, seed=0)
    method = methods.Primal(flat, way, lr=0.1, plan=40)
    x = z = y = float(flat.weights.detach())
    batches = line.train(torch.Generator())
    for step in range(40):
        method.step(next(batches))
        z -= 0.1 * way.factor(step, 40) * 2 * y
        x = 0.95 * x + 0.05 * z
        y = 0.9 * x + 0.1 * z
    # Forty steps of float32 beside float64.
    assert float(method.answers()["now"]) == pytest.approx(x, rel=40 * 2**-23)


def test_the_bank_is_chosen_on_the_selection_part_and_told_on_the_other(studies):
    _, plan, *_ = studies
    marks = {"now": [1.0, 5.0], "ema0.005": [0.9, 6.0], "ema0.015": [2.0, 1.0],
             "ema0.05": [3.0, 1.0]}  # fmt: skip
    row = plan.Row(label="any", way=plan.COSINE, readout="bank")
    assert plan.read(row, marks, at=1) == 6.0


def test_a_stretched_schedule_stops_where_cosine_would_still_be_high(studies):
    methods, *_ = studies
    way = methods.Way(name="A", stretch=1.4)
    assert way.factor(1000, 1000) == pytest.approx(0.5 * (1 + math.cos(math.pi / 1.4)))


def test_the_conservative_preset_ends_where_a_stretched_cosine_with_its_averages_does(
    studies, line
):
    _, plan, *_ = studies
    from hybrid_studies.running import Run, train

    plain, library = (
        train(line, Run(task="line", way=way, lr=0.02, seed=0))["marks"]["end"]
        for way in (plan.STRETCHED, plan.LIBRARY[0].way)
    )
    best = min(plain[name][0] for name in ("now", "ema0.015", "ema0.05"))
    assert library["now"][0] == pytest.approx(best, rel=1e-4, abs=2e-6)


def test_every_held_out_example_that_the_library_looked_at_is_charged(studies, line):
    _, plan, *_ = studies
    from hybrid_studies.running import Run, train

    row = plan.LIBRARY[0]
    result = train(line, Run(task="line", way=row.way, lr=0.02, seed=0))
    # A hundredth of 40 steps is 1.2 passes: one example with each of three, a third of a step each.
    assert result["chosen_for"]["end"] == 1.0
    assert plan.cost(row, line, result) == 41.0
    # Stopped after a half, it is charged the look it has made there.
    assert plan.cost(row, line, result, mark="0.5") == 21.0


def test_a_choice_of_which_nothing_is_told_has_looked_at_all(studies, line):
    _, plan, *_ = studies
    told = {"spent": 40.0, "steps": 40}
    assert plan.cost(plan.LIBRARY[0], line, told) == 40 + 3 * 4 / 3
    assert plan.cost(plan.OURS[0], line, told, mark="0.5") == pytest.approx(20 + 4 * 4 / 3)


def test_the_balanced_preset_without_its_warm_up_is_primal_averaging(studies, line):
    methods, *_ = studies
    import narrowcast as nc
    from hybrid_studies.library import Library

    settings = {"preset": "balanced", "lookahead": nc.Lookahead(), "half_lives": ()}
    found = []
    for kind, constants in ((Library, settings), (methods.Primal, {})):
        way = methods.Way(name="any", stretch=1.4, constants=constants)
        method = kind(methods.Flat(line, seed=0), way, lr=0.1, plan=40)
        batches = line.train(torch.Generator())
        for _ in range(40):
            method.step(next(batches))
        found.append(float(method.answers()["now"]))
    assert found[0] == pytest.approx(found[1], rel=40 * 2**-23)


def test_all_that_questions_wait_for_is_noted_at_once_and_nothing_is_trained(studies, line):
    _, plan, *_ = studies
    from hybrid_studies.running import Run, Runs
    from hybrid_studies.workers import Asked, UnfinishedError

    runs = object.__new__(Runs)
    runs.done = {Run(task="line", way=plan.COSINE, lr=0.1, seed=0).key: {}}
    asked = Asked(runs)
    for seed in (0, 1, 2):
        run = Run(task="line", way=plan.COSINE, lr=0.1, seed=seed)
        if seed == 0:
            assert asked.all(line, [run]) == [{}]
            continue
        with pytest.raises(UnfinishedError):
            asked.all(line, [run])
    assert [run.seed for run in asked.missing.values()] == [1, 2]


def test_the_report_has_the_savings_that_were_measured():
    results = Path(__file__).parents[3] / "benchmarks/results"
    summaries = [
        json.loads((results / f"{name}.json").read_text())["summary"]
        for name in ("hybrid-cpu", "hybrid-library-cpu")
    ]
    tasks = [task for task in summaries[0] if "schedule-free" in summaries[0][task]["rows"]]
    for label, shown in {
        "narrowcast conservative": "hybrid, conservative",
        "narrowcast balanced": "hybrid, balanced",
        "schedule-free": "schedule-free",
    }.items():
        summary = next(s for s in reversed(summaries) if label in s[tasks[0]]["rows"])
        rows = [summary[task]["rows"][label] for task in tasks]
        savings = [row["saving"][0] for row in rows]
        numbers = (sum(savings) / len(savings), min(savings), max(savings))
        cells = "".join(f"<td>{number:.2f}</td>" for number in numbers)
        assert f"<tr><td>{shown}</td>{cells}</tr>" in WHICH_WHEN
