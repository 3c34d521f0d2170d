"""What a live page lists: skipped steps, findings, changes of format; each a bounded collection."""

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from narrowcast.config.problems import shortened
from narrowcast.report.charts.series import Mark, add_mark
from narrowcast.report.layers import named
from narrowcast.runs.records import (
    FindingRecord,
    PrecisionRecord,
    StepRecord,
    StrategyRecord,
)

MOST_MARKS = 1000
"""Rows of skipped steps; a chart is about a thousand pixels wide."""
MOST_EVENTS = 200
"""Findings and changes listed, as many as in the report."""
LONGEST_TEXT = 400
"""Characters of a text that are shown; a page lists a few hundred of them."""


@final
class Skips:
    """Skipped steps, those in a row with one reason and one scale as one row."""

    def __init__(self) -> None:
        self.epoch = self.added = 0
        self._marks: list[Mark] = []

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, record: StepRecord) -> None:
        self.added += 1
        add_mark(self._marks, record, why=for_page(record.skip_reason))
        if len(self._marks) > MOST_MARKS:
            self._join()

    def rows(self, start: int = 0) -> list[list[Any]]:
        """Return first and last step, number of skips, loss scale and reason of each row."""
        return [
            [m.first, m.last, m.steps, m.loss_scale if math.isfinite(m.loss_scale) else None, m.why]
            for m in self._marks[start:]
        ]

    def _join(self) -> None:
        """Make one row of each two; it says the reason of the later."""
        self.epoch += 1
        marks = self._marks
        self._marks = [
            replace(b, first=a.first, steps=a.steps + b.steps)
            for a, b in zip(marks[::2], marks[1::2], strict=False)
        ] + (marks[-1:] if len(marks) % 2 else [])


@dataclass(frozen=True, kw_only=True)
class Event:
    """A finding, as often as it came up, a change of format, or what a strategy did."""

    key: int
    """Numbers the events, in the order they first came up."""
    moved: int
    """When it last changed, by the count of changes."""
    kind: str
    module: str
    role: str
    text: str
    why: str
    action: str
    before: str = ""
    after: str = ""
    first: int
    last: int
    times: int = 1

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "moved"}


@final
class Events:
    """Findings and changes of format; findings that say the same of one place are one event."""

    def __init__(self) -> None:
        self.moves = 0
        """How often they have changed."""
        self.findings = self.changes = 0
        self._events: OrderedDict[tuple[object, ...], Event] = OrderedDict()

    def add(self, record: FindingRecord | PrecisionRecord | StrategyRecord) -> None:
        """Take one more; the event that has rested longest makes room."""
        self.moves += 1
        match record:
            case FindingRecord():
                self.findings += 1
                self._put(
                    (record.module, record.role, record.what),
                    kind="finding",
                    module=record.module,
                    role=record.role,
                    text=record.what,
                    why=record.why,
                    action=record.remedy,
                    step=record.step,
                )
            case PrecisionRecord():
                self.changes += 1
                self._put(
                    (record.step, record.module, record.before, record.after),
                    kind="format",
                    module=named(record.module),
                    before=record.before,
                    after=record.after,
                    why=record.reason,
                    step=record.step,
                )
            case StrategyRecord():
                self._put(
                    (record.step, record.event, record.what),
                    kind="strategy",
                    module=record.event,
                    text=record.what,
                    why=record.why,
                    step=record.step,
                )
        while len(self._events) > MOST_EVENTS:
            self._events.popitem(last=False)

    def since(self, moves: int) -> list[dict[str, Any]]:
        """Return the events that have changed since there were `moves` changes."""
        return [event.row() for event in self._events.values() if event.moved > moves]

    def _put(self, location: tuple[object, ...], *, step: int, kind: str, **texts: str) -> None:
        earlier = self._events.pop(location, None)
        known = dict.fromkeys(("module", "role", "text", "why", "action"), "") | texts
        self._events[location] = Event(
            key=earlier.key if earlier else self.moves,
            moved=self.moves,
            kind=kind,
            first=earlier.first if earlier else step,
            last=step,
            times=earlier.times + 1 if earlier else 1,
            **{name: for_page(text) for name, text in known.items()},
        )


@final
class Changes:
    """The steps at which formats changed, for a chart; the newest of them."""

    def __init__(self) -> None:
        self.epoch = self.added = 0
        self._rows: list[list[Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: PrecisionRecord) -> None:
        self.added += 1
        text = for_page(f"{named(record.module)} {record.before} → {record.after}")
        if self._rows and self._rows[-1][0] == record.step:
            _, times, first = self._rows[-1]
            self._rows[-1] = [record.step, times + 1, first]
            return
        self._rows.append([record.step, 1, text])
        if len(self._rows) > MOST_EVENTS:
            self.epoch += 1
            del self._rows[: MOST_EVENTS // 2]

    def rows(self, start: int = 0) -> list[list[Any]]:
        """Return step, number of changes, and the first of them in words."""
        return [list(row) for row in self._rows[start:]]


def for_page(text: str) -> str:
    """Cut a text that no page could show."""
    return shortened(text, LONGEST_TEXT)
