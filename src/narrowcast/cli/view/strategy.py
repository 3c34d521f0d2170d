"""What a strategy will do, and what it does as it goes, for people."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from narrowcast.cli.view.screen import say
from narrowcast.report.phrases import count, measured, said, size
from narrowcast.runs import StrategyRecord
from narrowcast.runs.task_info import TaskInfo


def print_strategy(console: Console, row: Mapping[str, Any] | None) -> None:
    """Say what a strategy does and what it keeps; nothing for plain training."""
    if row is None:
        return
    stored = {name: size(n) for name, n in row["bytes"].items() if n}
    more = "; ".join(f"{name} {n}" for name, n in stored.items())
    say(
        console, "strategy", f"{row['name']}, {row['preset']}" + (f"; keeps {more}" if more else "")
    )
    for sentence in row["lines"]:
        say(console, "", sentence)


def strategy_line(record: StrategyRecord, task: TaskInfo) -> str:
    """Write what a strategy did in one line; nothing where that is no news."""
    match record.event:
        case "phase":
            steps = count(int(record.values["steps"]), "step")
            return f"step {record.step}: {record.what}, {steps}: {record.why}"
        case "jump":
            return f"step {record.step}: jump by {record.what}: {record.why}"
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
