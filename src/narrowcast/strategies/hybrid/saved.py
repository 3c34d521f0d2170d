"""What a hybrid run has saved against the plain run beside it, in steps and in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.runs import EvalRecord, Record, StepRecord, StrategyRecord
from narrowcast.runs.task_info import Metric


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a hybrid run was as good as the plain one in the end."""

    plain: float
    """The headline of the plain run's last evaluation."""
    plain_steps: int
    plain_seconds: float
    ended: float
    """The headline of the hybrid run's last evaluation."""
    steps: float | None
    """Where the hybrid run reached it, between two evaluations on a straight line; None: never."""
    seconds: float
    """What its steps, and all that the strategy did beside them, took up to there."""


def reached(records: Sequence[Record], metric: Metric) -> Reached | None:
    """Compare a run with the plain one that its records tell of; None where they tell of none."""
    plain = [
        record
        for record in records
        if isinstance(record, StrategyRecord)
        and record.event == "baseline"
        and metric.name in record.values
    ]
    course = [
        (record.step, record.metrics[metric.name])
        for record in records
        if isinstance(record, EvalRecord) and metric.name in record.metrics
    ]
    if not plain or not course:
        return None
    goal = plain[-1].values[metric.name]
    sign = 1 if metric.better == "lower" else -1
    steps = _crossing([(step, sign * y) for step, y in course], sign * goal)
    return Reached(
        plain=goal,
        plain_steps=int(plain[-1].values["step"]),
        plain_seconds=plain[-1].seconds,
        ended=course[-1][1],
        steps=steps,
        seconds=_seconds_until(records, course[-1][0] if steps is None else steps),
    )


def _crossing(course: Sequence[tuple[int, float]], goal: float) -> float | None:
    """Return where a course that is to fall first reaches a goal."""
    before: tuple[int, float] | None = None
    for step, y in course:
        if y <= goal:
            if before is None or before[1] <= y:
                return float(step)
            share = (before[1] - goal) / (before[1] - y)
            return before[0] + share * (step - before[0])
        before = (step, y)
    return None


def _seconds_until(records: Sequence[Record], step: float) -> float:
    """Sum what steps and the strategy took up to a step; evaluations by the plain run take none."""
    return sum(
        record.seconds
        for record in records
        if (isinstance(record, StepRecord) and record.step <= step)
        or (isinstance(record, StrategyRecord) and record.event == "jump" and record.step <= step)
    )
