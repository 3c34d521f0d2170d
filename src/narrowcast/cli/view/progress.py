"""Progress of a run: a bar on a terminal, occasional lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from narrowcast.cli.view.screen import is_live
from narrowcast.report.phrases import count, measured, said
from narrowcast.runner.progress import measures, numbers
from narrowcast.runs import (
    EvalRecord,
    FindingRecord,
    PrecisionRecord,
    Record,
    StepRecord,
    StrategyRecord,
)
from narrowcast.runs.tally import Tally
from narrowcast.runs.task_info import TaskInfo

LINE_SECONDS = 2.0
"""Between two plain lines, and between two lines of one kind of trouble."""
LINE_SHARE = 0.01
"""A long run prints more rarely: after this share of its time so far, so that a log stays short."""
BAR_WIDTH = 24
BAR_ROOM = BAR_WIDTH + 24
"""Columns beside the numbers: the bar, and how many steps of how many."""
TOLD_AT_ONCE = 3
"""Lines of one kind of trouble that are printed however quickly they come."""


@final
class RunDisplay:
    """Shows the records of one run; a context, because a bar has to be put away."""

    def __init__(self, console: Console, tally: Tally, *, task: TaskInfo, scaled: bool) -> None:
        """Start at `tally`; `scaled` adds the loss scale."""
        self.task = task
        self.tally = tally
        self.metrics: dict[str, float] = {}
        """What the last evaluation found."""
        self._console, self._scaled = console, scaled
        self._meter: _Meter = _Bar(console, tally) if is_live(console) else _Lines(console)
        self._skips, self._findings = _Sparingly(), _Sparingly()

    def show(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.tally = self.tally.after(record)
                if not record.applied:
                    why = f"step {record.step} skipped: {record.skip_reason}"
                    self._skips.tell(lambda more: self.warn(why + more))
                self._meter.update(self.tally, self._numbers())
            case EvalRecord():
                self.metrics = record.metrics
                result = measures(self.task, record.metrics)
                self._print(Text(f"step {record.step} evaluated: {result}"))
            case FindingRecord():
                where = f"{record.module}: " if record.module else ""
                rest = f"; {record.remedy}" if record.remedy else ""
                trouble = f"step {record.step}: {where}{record.what}: {record.why}{rest}"
                self._findings.tell(lambda more: self.warn(trouble + more))
            case StrategyRecord():
                if text := strategy_line(record, self.task):
                    self._print(Text(text))
            case PrecisionRecord():
                what = "policy" if record.module == "*" else record.module
                change = f"{what} {record.before} → {record.after}: {record.reason}"
                self._print(Text(f"step {record.step}: {change}"))
            case _:
                pass  # checkpoints and samples of statistics are not shown

    def note(self, text: str) -> None:
        """Show something that happened before the first record."""
        self._print(Text(text))

    def warn(self, text: str) -> None:
        """Show something that its owner should know of and that does not stop the run."""
        self._print(Text(text, style="yellow"))

    def _numbers(self) -> str:
        """Write the numbers of the run, with the parts of its loss where there is room."""
        whole = numbers(self.tally, task=self.task, scaled=self._scaled, parts=True)
        if len(whole) + BAR_ROOM <= self._console.width:
            return whole
        return numbers(self.tally, task=self.task, scaled=self._scaled, parts=False)

    def _print(self, text: Text) -> None:
        self._console.print(text)

    def __enter__(self) -> Self:
        self._meter.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._meter.close()


def strategy_line(record: StrategyRecord, task: TaskInfo) -> str:
    """Describe what a strategy did in one line; empty if it is not worth a line."""
    match record.event:
        case "phase":
            steps = count(int(record.values["steps"]), "step")
            return f"step {record.step}: {record.what}, {steps}: {record.why}"
        case "jump":
            return f"step {record.step}: prediction of {record.what}: {record.why}"
        case "readout" if len(record.values) > 1:
            metric = task.headline
            each = [f"{name} {measured(metric, y)}" for name, y in record.values.items()]
            return (
                f"step {record.step} returned weights: {record.what} ({', '.join(each)}): "
                f"{record.why}"
            )
        case "baseline":
            metric, step = task.headline, int(record.values["step"])
            y = measured(metric, record.values[metric.name])
            return f"plain run, step {step}: {said(metric.name)} {y}"
        case _:
            return ""


class _Meter(Protocol):
    """Something that shows how far a run is."""

    def open(self) -> None: ...
    def update(self, tally: Tally, text: str) -> None: ...
    def close(self) -> None: ...


class _Bar:
    """One line at the bottom of a terminal that is drawn again and again."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._bar = Progress(
            BarColumn(bar_width=BAR_WIDTH, complete_style="cyan"),
            TextColumn("{task.completed}/{task.total}", style="bold"),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            refresh_per_second=5,
        )
        self._task = self._bar.add_task("", total=tally.steps, completed=tally.step, text="")

    def open(self) -> None:
        self._bar.start()
        # A second Ctrl-C ends the process at once, with the cursor still hidden.
        self._bar.console.show_cursor(True)

    def update(self, tally: Tally, text: str) -> None:
        self._bar.update(self._task, completed=tally.step, text=text)

    def close(self) -> None:
        self._bar.stop()


class _Lines:
    """A line at the first step, at the last one, and now and then between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._last = time.monotonic()

    def open(self) -> None:
        self._began = time.monotonic()
        self._last = 0.0

    def update(self, tally: Tally, text: str) -> None:
        now = time.monotonic()
        due = self._last + max(LINE_SECONDS, LINE_SHARE * (now - self._began))
        if now >= due or tally.step == tally.steps:
            self._last = now
            self._console.print(f"step {tally.step}/{tally.steps}  {text}")

    def close(self) -> None:
        return


class _Sparingly:
    """Passes on the first few of many like lines, then one now and then with a count."""

    def __init__(self) -> None:
        self._shown = self._untold = 0
        self._last = 0.0

    def tell(self, line: Callable[[str], None]) -> None:
        """Call `line` with what to add to it, or count it for the next time."""
        now = time.monotonic()
        if self._shown >= TOLD_AT_ONCE and now < self._last + LINE_SECONDS:
            self._untold += 1
            return
        line(f" (and {self._untold} more before it)" if self._untold else "")
        self._shown, self._untold, self._last = self._shown + 1, 0, now
