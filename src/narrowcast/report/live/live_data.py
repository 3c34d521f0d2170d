"""What a live page shows of one run's records, in a bounded number of buckets per curve."""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from narrowcast.report.charts.drawing import rounded
from narrowcast.report.charts.run_charts import LOSS
from narrowcast.report.live.events import Changes, Events, Skips, for_page
from narrowcast.report.live.status import LiveProgress
from narrowcast.report.phrases import count, measured
from narrowcast.report.run_data import headline_metric
from narrowcast.runs.improvement import Improvement
from narrowcast.runs.records import (
    CheckpointRecord,
    EvalRecord,
    FindingRecord,
    PrecisionRecord,
    Record,
    StepRecord,
    StrategyRecord,
)
from narrowcast.runs.tally import Tally
from narrowcast.runs.task_info import BEFORE_TASK_JSON, Metric, TaskInfo
from narrowcast.runs.vitals import Vitals

Row = list[float | None]
"""The mean of a bucket, then step and value of each point kept, in order; None is a gap."""


@final
class Curve:
    """Values over steps; `epoch` moves when buckets are joined."""

    def __init__(self, most: int) -> None:
        """Start empty; there are at most `most` buckets, an even number."""
        self.epoch = self.added = 0
        self._most, self._width = most, 1
        self._buckets: list[_Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, step: int, y: float | None) -> None:
        """Take the value of the next step; what is absent or not finite is a gap."""
        self.added += 1
        if y is not None and not math.isfinite(y):
            y = None
        if self._buckets and self._buckets[-1].first // self._width == step // self._width:
            self._buckets[-1].add(step, y)
            return
        self._buckets.append(_Bucket(first=step))
        self._buckets[-1].add(step, y)
        if len(self._buckets) > self._most:
            self._join()

    def rows(self, start: int = 0) -> list[list[Any]]:
        """Return the buckets from `start` on."""
        last = len(self._buckets) - 1
        return [b.row(open_ended=i == last) for i, b in enumerate(self._buckets) if i >= start]

    @property
    def values(self) -> list[float]:
        """The least and the greatest value of each bucket."""
        return [point[1] for b in self._buckets for point in (b.low, b.high) if point]

    def _join(self) -> None:
        self._width *= 2
        self.epoch += 1
        joined: list[_Bucket] = []
        for bucket in self._buckets:
            if joined and joined[-1].first // self._width == bucket.first // self._width:
                joined[-1].join(bucket)
            else:
                joined.append(bucket)
        self._buckets = joined


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Neighbouring steps; changed in place, because seven curves take each of a million steps."""

    first: int
    count: int = 0
    """How many of them were finite."""
    total: float = 0.0
    low: tuple[int, float] | None = None
    high: tuple[int, float] | None = None
    gap: int | None = None
    last: tuple[int, float | None] = (0, None)

    def add(self, step: int, y: float | None) -> None:
        self.last = (step, y)
        if y is None:
            self.gap = step if self.gap is None else self.gap
            return
        self.count += 1
        self.total += y
        if self.low is None or y < self.low[1]:
            self.low = (step, y)
        if self.high is None or y > self.high[1]:
            self.high = (step, y)

    def join(self, later: "_Bucket") -> None:
        self.count += later.count
        self.total += later.total
        if later.low and (self.low is None or later.low[1] < self.low[1]):
            self.low = later.low
        if later.high and (self.high is None or later.high[1] > self.high[1]):
            self.high = later.high
        self.gap = later.gap if self.gap is None else self.gap
        self.last = later.last

    def row(self, *, open_ended: bool) -> Row:
        points: dict[int, float | None] = {}
        if self.gap is not None:
            points[self.gap] = None
        points.update(point for point in (self.low, self.high) if point)
        if open_ended:
            points[self.last[0]] = self.last[1]
        # The sum of finite values need not be finite.
        mean = self.total / self.count if self.count else math.inf
        row: Row = [rounded(mean) if math.isfinite(mean) else None]
        for step in sorted(points):
            row += [step, rounded(points[step])]
        return row


MOST_BUCKETS = {"loss": 1000, "scale": 600}
SMALL_BUCKETS = 300
"""Two points each, as many as a small chart has pixels."""
MOST_EVALS = 50
"""Evaluations in the table."""
MOST_METRICS = 12
"""Columns of that table."""

MOST_PARTS = 8
"""Parts of the loss that are drawn, each in a colour of its own."""
PART = "part:"
"""Before the name of a part of the loss, in the name of its list."""

CURVES = ("loss", "scale", "speed", "memory", "norm", "lr", "lost", "evaluated", "headline")


Growing: TypeAlias = Curve | Skips | Changes
"""Rows that are added to, of which only the last may change; if others do too, `epoch` moves."""


@final
class LiveData:
    """The records of one file from its beginning, summed up as they come."""

    def __init__(self, task: TaskInfo = BEFORE_TASK_JSON, *, min_delta: float = 0.0) -> None:
        """Start before the first record; `min_delta` comes from the recipe."""
        self.task, self._min_delta = task, min_delta
        self.tally = Tally(steps=0)
        self.course = LiveProgress()
        self.vitals, self.improvement = Vitals(), Improvement()
        self.last: StepRecord | None = None
        self.peak_bytes = 0
        self.scaled = False
        """Whether the loss scale was ever other than 1."""
        self.metric: Metric | None = None
        """The metric that evaluations are headed by."""
        self.evals: deque[tuple[int, dict[str, float]]] = deque(maxlen=MOST_EVALS)
        self.evals_seen = 0
        self.skips, self.events, self.changes = Skips(), Events(), Changes()
        self.parts: dict[str, Curve] = {}
        self.curves = {name: Curve(MOST_BUCKETS.get(name, SMALL_BUCKETS)) for name in CURVES}

    def add(self, record: Record) -> None:
        metric = self.task.headline
        self.vitals = self.vitals.after(record, headline=metric.name)
        self.improvement = self.improvement.after(record, metric=metric, min_delta=self._min_delta)
        match record:
            case StepRecord():
                self._add_step(record)
            case EvalRecord():
                self._add_eval(record)
            case FindingRecord():
                self.events.add(record)
            case PrecisionRecord():
                self.events.add(record)
                self.changes.add(record)
            case StrategyRecord(event="phase" | "jump" | "readout"):
                self.events.add(record)
            case CheckpointRecord():
                self.course = replace(self.course, saved_at=record.step)

    def eval_rows(self, start: int) -> list[list[str | dict[str, str]]]:
        """Return step and metrics, as texts, of the evaluations after the first `start`."""
        new = min(self.evals_seen - start, len(self.evals))
        return [
            [count(step), {for_page(n): self._written(n, y) for n, y in metrics.items()}]
            for step, metrics in list(self.evals)[len(self.evals) - new :]
        ]

    def lists(self) -> dict[str, Growing]:
        """Return what grows at its end, by name."""
        parts = {f"{PART}{for_page(name)}": curve for name, curve in self.parts.items()}
        return {**self.curves, **parts, "skips": self.skips, "changes": self.changes}

    def _written(self, name: str, y: float) -> str:
        return measured(self.task.metric(name), y)

    def _add_step(self, record: StepRecord) -> None:
        self.tally = self.tally.after(record)
        self.peak_bytes = max(self.peak_bytes, record.peak_bytes)
        self.scaled = self.scaled or record.loss_scale != 1
        self._draw(record)
        if not record.applied:
            self.skips.add(record)
        self.course = self._course_after(record)
        self.last = record

    def _draw(self, record: StepRecord) -> None:
        speed = record.items / record.seconds if record.seconds > 0 else None
        values = {
            "loss": record.loss,
            "scale": record.loss_scale if record.loss_scale > 0 else None,
            "speed": speed,
            "memory": float(record.peak_bytes) if record.peak_bytes > 0 else None,
            "norm": record.grad_norm,
            "lr": record.lr,
        }
        for name, y in values.items():
            self.curves[name].add(record.step, y)
        for name, y in record.loss_parts.items():
            if name in self.parts or len(self.parts) < MOST_PARTS:
                self.parts.setdefault(name, Curve(SMALL_BUCKETS)).add(record.step, y)
        if record.lost_updates is not None:
            self.curves["lost"].add(record.step, record.lost_updates)

    def _course_after(self, record: StepRecord) -> LiveProgress:
        before, last = self.course, self.last
        same_scale = last is not None and last.loss_scale == record.loss_scale
        in_a_row = 0 if record.applied else 1 + (before.skipped_in_a_row if same_scale else 0)
        lost_since = before.lost_since if before.lost_since is not None else record.step
        return replace(
            before,
            step=record.step,
            skipped_in_a_row=in_a_row,
            loss_scale=record.loss_scale,
            why=for_page(record.skip_reason),
            lost_since=None if math.isfinite(record.loss) else lost_since,
            step_seconds=self.tally.step_seconds,
        )

    def _add_eval(self, record: EvalRecord) -> None:
        self.metric = self.metric or headline_metric(self.task, record.metrics)
        self.evals_seen += 1
        self.evals.append((record.step, dict(list(record.metrics.items())[:MOST_METRICS])))
        # Of all metrics, the loss is what the training loss compares with; the report does alike.
        if LOSS in record.metrics:
            self.curves["evaluated"].add(record.step, record.metrics[LOSS])
        if self.metric and self.metric.name != LOSS and self.metric.name in record.metrics:
            self.curves["headline"].add(record.step, record.metrics[self.metric.name])
