"""The changes of a run folder since the last request. Nothing is read between requests."""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, final

from narrowcast.errors import CheckpointError
from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import frame_top
from narrowcast.report.live.events import for_page
from narrowcast.report.live.head import head, setting, whole
from narrowcast.report.live.live_data import Growing, LiveData
from narrowcast.report.live.status import status
from narrowcast.report.summary import RunEnding
from narrowcast.runs.folder import ENVIRONMENT, RECORDS, RESOLVED, TASK
from narrowcast.runs.follow import Follower, News
from narrowcast.runs.improvement import delta_in
from narrowcast.runs.lock import LOCK, is_held
from narrowcast.runs.strict_json import peek_json
from narrowcast.runs.task_info import BEFORE_TASK_JSON, TaskInfo

LOOK_SECONDS = 0.25
"""Between two looks, however many pages ask."""
SETTINGS_SECONDS = 2.0
"""Between two looks at the files that change only when a run is continued."""
MOST_BYTES = 4 * 2**20
"""Of such a file; that of the largest shipped recipe has 10 KB."""
KINDS = ("step", "eval", "finding", "precision", "checkpoint")


@dataclass(frozen=True)
class Cursor:
    """What one page has received."""

    generation: int = -1
    head: Mapping[str, Any] = field(default_factory=dict)
    frame: Mapping[str, Any] = field(default_factory=dict)
    lists: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Epoch, length and number of additions of each list."""
    evals: int = 0
    moves: int = 0


@final
class WatchedRun:
    """One run folder; its methods may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        """Start with nothing read; `folder` need not exist any more."""
        self.folder = folder
        self._lock = Lock()
        self._follower = Follower(folder / RECORDS, kinds=KINDS)
        self._data, self._generation = LiveData(), 0
        self._news = News()
        self._damaged = 0
        self._settings: Mapping[str, Any] = {}
        self._task = BEFORE_TASK_JSON
        self._sessions: tuple[Mapping[str, Any], ...] = ()
        self._looked = self._read_settings = -1e9
        self._head: dict[str, Any] = {}
        self._frame: dict[str, Any] = {}

    def since(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        """Return what has changed since `cursor`, and the cursor after it; {} if nothing has."""
        with self._lock:
            self._look()
            return self._payload(cursor)

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return
        if now >= self._read_settings + SETTINGS_SECONDS:
            self._read_settings = now
            self._read_files()
        news = self._follower.look()
        if news.afresh:
            self._read_files()
            min_delta = delta_in(setting(self._settings, "eval.min_delta"))
            self._data, self._damaged = LiveData(self._task, min_delta=min_delta), 0
            self._generation += 1
        for record in news.records:
            self._data.add(record)
        self._damaged += news.damaged
        self._news = news
        self._sum_up()
        # Not before the work is done: a long look must not be followed by the next at once.
        self._looked = time.monotonic()

    def _read_files(self) -> None:
        result = peek_json(self.folder / RESOLVED, most_bytes=MOST_BYTES)
        if isinstance(result, dict):
            self._settings = result
        # The report raises for a damaged file; the page continues with what it has read.
        with contextlib.suppress(CheckpointError):
            said = peek_json(self.folder / TASK, most_bytes=MOST_BYTES)
            self._task = BEFORE_TASK_JSON if said is None else TaskInfo.from_json(said)
        self._data.task = self._task
        match peek_json(self.folder / ENVIRONMENT, most_bytes=MOST_BYTES):
            case {"sessions": [*sessions]}:
                self._sessions = tuple(s for s in sessions if isinstance(s, dict))

    def _sum_up(self) -> None:
        data = self._data
        requested = whole(setting(self._settings, "steps")) or 0
        patience = whole(setting(self._settings, "precision.loss_scale.max_skipped_steps"))
        data.tally = replace(data.tally, steps=requested)
        diverged = for_page(data.vitals.diverged)
        course = replace(
            data.course,
            requested_steps=requested,
            max_skipped_steps=patience,
            diverged=diverged,
            ended_early=self._ended_early(requested),
        )
        ending, at_work = status(
            course,
            folder=self.folder,
            held=is_held(self.folder / LOCK),
            quiet=max(0.0, time.time() - self._news.written),
            missing=self._news.missing,
        )
        if self._news.more:
            ending, at_work = RunEnding("Reading", "fair"), False
        self._head = head(
            data,
            ending=ending,
            at_work=at_work,
            settings=self._settings,
            sessions=self._sessions,
        ) | {"damaged": self._damaged, "reading": self._news.more}
        self._frame = self._frames()

    def _ended_early(self, request: int) -> str:
        data, matched = self._data, self._data.improvement
        patience = whole(setting(self._settings, "eval.patience"))
        if patience is None or not 0 < matched.evaluated == data.tally.step < request:
            return ""
        return for_page(matched.why_over(metric=data.task.headline, patience=patience))

    def _frames(self) -> dict[str, Any]:
        """Choose the axes that depend on the values, as the report does; None lets the page."""
        losses = [*self._data.curves["loss"].values, *self._data.curves["evaluated"].values]
        scales = self._data.curves["scale"].values
        top = frame_top(losses)
        low = min(losses) if losses else 0.0
        ends = [] if top is None else [low - 0.05 * (top - low), top]
        # Larger powers of two are not floats; loss scales stay far below.
        drawable = bool(scales) and 2.0**-1000 < min(scales) <= max(scales) < 2.0**1000
        return {
            "loss": ends if ends and all(map(math.isfinite, ends)) else None,
            "scale": drawing.powers_of_two(scales) if drawable and self._data.scaled else None,
        }

    def _payload(self, cursor: Cursor) -> tuple[Cursor, dict[str, Any]]:
        data = self._data
        news: dict[str, Any] = {}
        if cursor.generation != self._generation:
            cursor, news = Cursor(), {"reset": True}
        if self._head != cursor.head:
            news["head"] = self._head
        if self._frame != cursor.frame:
            news["frame"] = self._frame
        grown = {
            name: [at, growing.rows(at)]
            for name, growing in data.lists().items()
            if (at := _first_changed(growing, cursor.lists.get(name))) is not None
        }
        if grown:
            news["lists"] = grown
        if evals := data.eval_rows(cursor.evals):
            news["evals"] = evals
        if events := data.events.since(cursor.moves):
            news["events"] = events
        return (
            Cursor(
                generation=self._generation,
                head=self._head,
                frame=self._frame,
                lists={n: (g.epoch, len(g), g.added) for n, g in data.lists().items()},
                evals=data.evals_seen,
                moves=data.events.moves,
            ),
            news,
        )


def _first_changed(growing: Growing, lines: tuple[int, int, int] | None) -> int | None:
    """Return the first row that a page has not received in its current form; None if it has all."""
    epoch, length, added = lines or (growing.epoch, 0, 0)
    if epoch != growing.epoch:
        return 0
    # Only the last row that was sent may have changed since.
    return max(0, length - 1) if added != growing.added else None
