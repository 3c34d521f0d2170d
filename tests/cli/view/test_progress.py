import io
from dataclasses import replace

import pytest
from rich.console import Console

from narrowcast.cli.view import progress
from narrowcast.cli.view.progress import RunDisplay
from narrowcast.runs import CheckpointRecord, EvalRecord, FindingRecord, PrecisionRecord, StepRecord
from narrowcast.runs.tally import Tally
from narrowcast.runs.task_info import Metric, TaskInfo

TOKENS = TaskInfo(unit="token")


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when it is told to."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=1000, highlight=False, markup=False)


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def step(number: int, *, applied: bool = True, why: str = "") -> StepRecord:
    return StepRecord(
        step=number,
        loss=2.5,
        loss_scale=1024.0,
        applied=applied,
        skip_reason=why,
        grad_norm=1.0,
        lr=0.1,
        lost_updates=None,
        items=100,
        seconds=0.1,
        peak_bytes=0,
    )


def test_a_plain_line_has_loss_scale_pace_and_time_left(console, clock):
    with RunDisplay(console, Tally(steps=11), task=TOKENS, scaled=True) as display:
        for number in range(1, 5):
            display.show(step(number))
            clock.now += 1
    assert shown(console) == [
        "step 1/11  mean loss 2.500  scale 1,024  1.00 k tokens/s",  # how long, nobody knows yet
        "step 3/11  mean loss 2.500  scale 1,024  1.00 k tokens/s",
    ]
    with RunDisplay(console, display.tally, task=TOKENS, scaled=True) as display:
        display.show(step(5))
    assert (
        shown(console)[-1]
        == "step 5/11  mean loss 2.500  scale 1,024  1.00 k tokens/s  600 ms left"
    )


def test_no_scale_is_shown_where_there_is_none(console, clock):
    with RunDisplay(console, Tally(steps=10), task=TOKENS, scaled=False) as display:
        display.show(step(1))
    assert "scale" not in shown(console)[0]


def test_plain_lines_come_at_the_first_and_the_last_step_and_every_two_seconds(console, clock):
    with RunDisplay(console, Tally(steps=100), task=TOKENS, scaled=False) as display:
        for number in range(1, 101):
            display.show(step(number))
            clock.now += 0.1
    numbers = [int(line.split()[1].partition("/")[0]) for line in shown(console)]
    assert numbers == [1, 21, 41, 61, 81, 100]


def test_a_day_of_steps_prints_hundreds_of_lines_not_tens_of_thousands(console, clock):
    with RunDisplay(console, Tally(steps=8640), task=TOKENS, scaled=False) as display:
        for number in range(1, 8641):
            display.show(step(number))
            clock.now += 10.0
    assert len(shown(console)) < 1000


def test_every_tenth_of_a_second_of_overflow_is_not_a_line_of_its_own(console, clock):
    with RunDisplay(console, Tally(steps=200), task=TOKENS, scaled=False) as display:
        for number in range(1, 101):
            display.show(step(number, applied=False, why=f"reason {number}"))
            clock.now += 0.1
    skips = [line for line in shown(console) if "skipped: reason" in line]
    assert skips[:3] == [f"step {n} skipped: reason {n}" for n in (1, 2, 3)]
    # Each line stands for itself and those it counts, and none is lost on the way.
    told = sum(1 + int(line.split("(and ")[1].split()[0]) for line in skips[3:]) + 3
    last = int(skips[-1].split()[1])
    assert told == last
    assert len(skips) < 10


def test_evaluations_findings_and_changes_of_format_are_told(console, clock):
    found = {"module": "head", "role": "grad", "what": "overflow", "why": "too large"}
    with RunDisplay(console, Tally(steps=9), task=TOKENS, scaled=False) as display:
        display.show(EvalRecord(step=5, metrics={"loss": 1.5, "bits_per_byte": 2.0}))
        display.show(FindingRecord(step=5, since=4, action="skipped", advice="try fp32", **found))
        display.show(FindingRecord(step=5, since=5, action="", advice="", **found))
        display.show(
            PrecisionRecord(step=5, module="head", before="e4m3", after="bf16", reason="overflow")
        )
        display.show(CheckpointRecord(step=5, seconds_blocked=0, seconds_total=0, bytes=0))
    assert shown(console) == [
        "step 5 evaluated: loss 1.500, bits per byte 2.000",
        "step 5: head: overflow: too large; skipped; try fp32",
        "step 5: head: overflow: too large",
        "step 5: head e4m3 → bf16: overflow",
    ]
    assert display.metrics["loss"] == 1.5


def test_text_in_brackets_is_shown_as_it_is(console, clock):
    with RunDisplay(console, Tally(steps=9), task=TOKENS, scaled=False) as display:
        display.show(step(1, applied=False, why="blocks[0] and [bold] are not finite"))
    assert "blocks[0] and [bold] are not finite" in shown(console)[0]


@pytest.mark.parametrize(("width", "fits"), [(1000, True), (80, False)])
def test_parts_of_the_loss_are_shown_where_they_fit(width, fits, clock):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    record = replace(step(1), loss_parts={"reconstruction": 2.25, "sparsity_penalty": 0.25})
    with RunDisplay(console, Tally(steps=1), task=TOKENS, scaled=False) as display:
        display.show(record)
    told = (
        "mean loss 2.500 (reconstruction 2.250, sparsity penalty 0.2500)"
        if fits
        else "mean loss 2.500  "
    )
    assert told in shown(console)[0]


def test_what_is_counted_and_how_metrics_are_written_is_the_task_s(console, clock):
    accuracy = Metric(name="accuracy", better="higher", text=".1%")
    series = TaskInfo(unit="series", plural="series", metrics=(accuracy, Metric(name="loss")))
    with RunDisplay(console, Tally(steps=1), task=series, scaled=False) as display:
        display.show(step(1))
        display.show(EvalRecord(step=1, metrics={"loss": 1.5, "accuracy": 0.912}))
    lines = shown(console)
    assert "series/s" in lines[0]
    assert lines[1] == "step 1 evaluated: accuracy 91.2%, loss 1.500"
