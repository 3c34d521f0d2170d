"""Report section of hybrid training: phases, candidate weights, comparison with plain training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from narrowcast.runs import EvalRecord, Record, ReportSection, StepRecord, StrategyRecord
from narrowcast.runs.report_drawing import (
    QUIET,
    Scale,
    axes,
    box,
    colour,
    drawing,
    legend,
    line,
    path,
    text_mark,
)
from narrowcast.runs.task_info import Metric, TaskInfo

WIDE, HIGH = 900.0, 300.0
LEFT, RIGHT, TOP, BELOW = 64.0, 12.0, 28.0, 48.0
STRIP = 26.0
WHICH_WHEN = (
    "<h3>Against other methods</h3><p>Not measured in this run: steps that tuned cosine needs for "
    "the loss of a method, per step of the method. Mean and range over six small tasks "
    "(benchmarks/hybrid.py).</p><div class='scroll'><table>"
    "<tr><th>method</th><th>saving</th><th>least</th><th>most</th></tr>"
    "<tr><td>cosine</td><td>1.00</td><td></td><td></td></tr>"
    "<tr><td>hybrid, conservative</td><td>1.14</td><td>0.96</td><td>1.28</td></tr>"
    "<tr><td>hybrid, balanced</td><td>1.28</td><td>1.15</td><td>1.39</td></tr>"
    "<tr><td>schedule-free</td><td>1.21</td><td>0.75</td><td>1.50</td></tr></table></div>"
)
"""Published in the docs with the table that it is from."""


def report_sections(records: Sequence[Record], task: TaskInfo) -> list[ReportSection]:
    """Return the report section of hybrid training; none for plain training."""
    events = [record for record in records if isinstance(record, StrategyRecord)]
    if not events:
        return []
    html = "".join(
        [
            _phases(events, records),
            _readouts(events, task.headline),
            _compared(events, records, task.headline),
            WHICH_WHEN,
            _jumps(events),
            _summed_up(events),
        ]
    )
    return [ReportSection(title="Hybrid training", html=html)]


def _phases(events: Sequence[StrategyRecord], records: Sequence[Record]) -> str:
    """Draw the phases as a strip, with a mark for each jump."""
    last = max((r.step for r in records if isinstance(r, StepRecord)), default=0)
    begun = [record for record in events if record.event == "phase"]
    if not begun or not last:
        return ""
    x = Scale(0, last, LEFT, WIDE - RIGHT)
    names = list(dict.fromkeys(record.phase for record in begun))
    ends = [*(record.step for record in begun[1:]), last]
    marks = [
        box(x(a.step), 4, x(end) - x(a.step), STRIP, fill=colour(names.index(a.phase)), opacity=0.6)
        for a, end in zip(begun, ends, strict=True)
    ]
    for jump in (record for record in events if record.event == "jump"):
        accepted = jump.values.get("accepted") == 1
        marks.append(line(x(jump.step), 0, x(jump.step), STRIP + 8, stroke=colour(4 + accepted)))
    for value, label in x.ticks():
        marks.append(text_mark(x(value), STRIP + 24, label, anchor="middle"))
    alt = "; ".join(f"{r.phase} from step {r.step}" for r in begun[:20])
    about = f"Phases: {alt}"
    strip = drawing(marks, width=WIDE, height=STRIP + 32, alt=about, most=WIDE, least=480)
    shades = [(colour(n), name) for n, name in enumerate(names)]
    if any(record.event == "jump" for record in events):
        shades += [(colour(4), "prediction rejected"), (colour(5), "prediction accepted")]
    return f"<h3>Phases</h3>{strip}{legend(shades)}"


def _readouts(events: Sequence[StrategyRecord], metric: Metric) -> str:
    """Draw the headline of all candidate weights, and of the plain run if there was one."""
    curves = dict[str, list[tuple[float, float]]]()
    for record in events:
        if record.event == "readout":
            for name, score in record.values.items():
                curves.setdefault(name, []).append((record.step, score))
    plain = _plain(events, metric)
    if plain:
        curves["plain training"] = plain
    points = [point for curve in curves.values() for point in curve]
    if len(points) < 2:
        return ""
    x = Scale(0, max(a for a, _ in points), LEFT, WIDE - RIGHT)
    y = Scale(min(b for _, b in points), max(b for _, b in points), HIGH - BELOW, TOP)
    marks = axes(x, y, x_label="step", y_label=metric.name)
    shades = []
    for number, (name, curve) in enumerate(curves.items()):
        shade = QUIET if name == "plain training" else colour(number)
        marks.append(path([(x(a), y(b)) for a, b in curve], stroke=shade))
        shades.append((shade, name))
    alt = f"{metric.name} of candidate weights by step"
    picture = drawing(marks, width=WIDE, height=HIGH, alt=alt, most=WIDE, least=480)
    chosen = [record for record in events if record.event == "readout"][-1:]
    note = "".join(f"<p>Returned: <b>{escape(r.what)}</b>, {escape(r.why)}.</p>" for r in chosen)
    return f"<h3>Candidate weights</h3>{picture}{legend(shades)}{note}"


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a hybrid run reached the final result of the plain one."""

    plain: float
    """Headline of the plain run's last evaluation."""
    plain_steps: int
    plain_seconds: float
    ended: float
    """Headline of the hybrid run's last evaluation."""
    steps: float | None
    """Where the hybrid run reached it, interpolated between two evaluations; None if never."""
    seconds: float
    """Time of its steps and jumps up to there."""


def reached(records: Sequence[Record], metric: Metric) -> Reached | None:
    """Compare a run with the plain run in its records; None if there is none."""
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
    """Return where falling values first reach a goal, interpolated."""
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
    """Return the time of steps and jumps up to a step."""
    return sum(
        record.seconds
        for record in records
        if (isinstance(record, StepRecord) and record.step <= step)
        or (isinstance(record, StrategyRecord) and record.event == "jump" and record.step <= step)
    )


def _compared(events: Sequence[StrategyRecord], records: Sequence[Record], metric: Metric) -> str:
    plain = [record for record in events if record.event == "baseline"]
    if not plain:
        return ""
    goal = reached(records, metric)
    return f"<h3>Against plain training</h3><p>{escape(_sentence(goal, metric))}</p>"


def _sentence(goal: Reached | None, metric: Metric) -> str:
    if goal is None:
        return f"The plain run has no {metric.name} to compare with."
    begin = (
        f"The plain run ends with {metric.name} {goal.plain:.5g} after {goal.plain_steps} steps in "
        f"{goal.plain_seconds:.1f} s"
    )
    if goal.steps is None:
        return f"{begin}. This run ends with {goal.ended:.5g} and has not reached it."
    return (
        f"{begin}. This run reached it at step {goal.steps:.0f} after {goal.seconds:.1f} s, with "
        f"{goal.steps / goal.plain_steps:.0%} of the steps (interpolated between two evaluations), "
        f"and ends with {goal.ended:.5g}. The time of evaluations is not included."
    )


def _jumps(events: Sequence[StrategyRecord]) -> str:
    tried = [record for record in events if record.event == "jump"]
    if not tried:
        return ""
    rows = "".join(
        f"<tr><td>{r.step}</td><td>{escape(r.what)}</td><td>{escape(r.why)}</td>"
        f"<td>{r.values.get('confidence', 0):.2f}</td><td>{r.seconds:.2f}</td></tr>"
        for r in tried[:100]
    )
    head = (
        "<tr><th>step</th><th>prediction</th><th>why</th><th>confidence</th><th>seconds</th></tr>"
    )
    return f"<h3>Predictions</h3><div class='scroll'><table>{head}{rows}</table></div>"


def _summed_up(events: Sequence[StrategyRecord]) -> str:
    summaries = [record for record in events if record.event == "summary"]
    if not summaries:
        return ""
    rows = "".join(_rows(summaries[-1]))
    return f"<h3>In numbers</h3><div class='scroll'><table>{rows}</table></div>"


def _rows(record: StrategyRecord) -> Iterator[str]:
    for name, value in record.values.items():
        if value or not name.startswith("steps in"):
            yield f"<tr><td>{escape(name)}</td><td>{value:,.6g}</td></tr>"


def _plain(events: Sequence[StrategyRecord], metric: Metric) -> list[tuple[float, float]]:
    return [
        (record.values["step"], record.values[metric.name])
        for record in events
        if record.event == "baseline" and metric.name in record.values
    ]
