"""Progress of a run as text, and its display in a notebook, a terminal or a log."""

import html
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from narrowcast.report.phrases import count, duration, large, measured, said, scale, value
from narrowcast.runs import EvalRecord, FindingRecord, Record, StepRecord
from narrowcast.runs.tally import Tally
from narrowcast.runs.task_info import TaskInfo

UPDATE_SECONDS = 0.2
LINE_SECONDS = 10.0
"""Between two lines where none can be overwritten."""
BAR_WIDTH = 24


def numbers(tally: Tally, *, task: TaskInfo, scaled: bool, parts: bool) -> str:
    """Return the numbers of a run in one line, with `parts` those of its loss parts."""
    lines = [f"mean loss {value(tally.loss)}"]
    if parts and tally.smooth_parts:
        each = [f"{said(name)} {value(x.value)}" for name, x in tally.smooth_parts.items()]
        lines[0] += f" ({', '.join(each)})"
    if scaled:
        lines.append(f"scale {scale(tally.scale)}")
    if tally.skipped:
        lines.append(f"{count(tally.skipped)} skipped")
    lines.append(f"{large(tally.items_per_second)} {task.units}/s")
    if tally.step < tally.steps and math.isfinite(tally.seconds_left):
        lines.append(f"{duration(tally.seconds_left)} left")
    return "  ".join(lines)


def measures(task: TaskInfo, metrics: dict[str, float]) -> str:
    """Return the metrics of an evaluation as text, the headline first."""
    order = [metric.name for metric in task.metrics]
    names = sorted(metrics, key=lambda name: order.index(name) if name in order else len(order))
    return ", ".join(f"{said(n)} {measured(task.metric(n), metrics[n])}" for n in names)


@dataclass(frozen=True, kw_only=True)
class Display:
    """A place where progress is shown."""

    write: Callable[[Tally, str], None]
    seconds: float
    """Between two updates."""
    end: str = ""
    """Written to stderr after the last update."""


def find_display(wanted: bool | None) -> Display | None:
    """Return where to show progress. With `wanted=None` only notebooks and terminals show it."""
    if wanted is False:
        return None
    if _in_notebook():
        return Display(write=_notebook_bar(), seconds=UPDATE_SECONDS)
    if sys.stderr.isatty():
        return Display(write=_write_over, seconds=UPDATE_SECONDS, end="\n")
    return Display(write=_write_line, seconds=LINE_SECONDS) if wanted else None


@final
class RunProgress:
    """Tallies the records of a run, and shows how far it is."""

    def __init__(
        self, tally: Tally, *, task: TaskInfo, scaled: bool, display: Display | None
    ) -> None:
        self.tally, self.metrics = tally, dict[str, float]()
        self.findings: list[FindingRecord] = []
        self._task, self._scaled, self._display = task, scaled, display
        self._due, self._pending = 0.0, False

    def take(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.tally = self.tally.after(record)
            case EvalRecord():
                self.metrics = record.metrics
            case FindingRecord():
                self.findings.append(record)
            case _:
                return
        self._pending = True
        if self._display is not None and time.monotonic() >= self._due:
            self._write(self._display)

    def close(self) -> None:
        if self._display is not None and self._due:
            if self._pending:
                self._write(self._display)
            sys.stderr.write(self._display.end)

    def _write(self, display: Display) -> None:
        text = numbers(self.tally, task=self._task, scaled=self._scaled, parts=False)
        headline = self._task.headline.name
        if headline in self.metrics:
            text += f"  evaluated: {measures(self._task, {headline: self.metrics[headline]})}"
        if self.findings:
            text += f"  {count(len(self.findings), 'finding')}"
        display.write(self.tally, text)
        self._due, self._pending = time.monotonic() + display.seconds, False


def _write_over(tally: Tally, text: str) -> None:
    """Overwrite the line of a terminal."""
    done = round(BAR_WIDTH * tally.step / max(tally.steps, 1))
    line = f"{'━' * done:{BAR_WIDTH}} {tally.step}/{tally.steps}  {text}"
    sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
    sys.stderr.flush()


def _write_line(tally: Tally, text: str) -> None:
    sys.stderr.write(f"step {tally.step}/{tally.steps}  {text}\n")
    sys.stderr.flush()


def _in_notebook() -> bool:
    """Return whether this is IPython with a kernel, as in a notebook."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def _notebook_bar() -> Callable[[Tally, str], None]:
    """Return a function that draws a bar in the output of the cell, and updates it."""
    display = import_module("IPython.display").display
    handles: list[Any] = []

    def write(tally: Tally, text: str) -> None:
        bar = f'<progress max="{tally.steps}" value="{tally.step}"></progress>'
        page = {"text/html": f"{bar} {tally.step}/{tally.steps} &nbsp; {html.escape(text)}"}
        if handles:
            handles[0].update(page, raw=True)
        else:
            handles.append(display(page, raw=True, display_id=True))

    return write
