"""The row that `precision.task` decided on, for people."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from narrowcast.cli.view.screen import say
from narrowcast.report.phrases import large
from narrowcast.report.settings_text import written


def print_task_row(console: Console, row: Mapping[str, Any]) -> None:
    """Say which row it was, why, what it has set, and who has set the rest."""
    size = f"{row['size']} ({large(row['parameters'])} parameters)"
    say(console, "task", f"{row['task']}, {size}, {row['hardware']}: {row['why']}")
    say(console, "why", row["reason"])
    by_task, by_others = list[str](), list[str]()
    for key, entry in row["settings"].items():
        text = f"{key}={written(entry['value'])}"
        if entry["origin"] == f"task {row['task']}":
            by_task.append(text)
        else:
            by_others.append(f"{text} ({entry['origin']})")
    say(console, "sets", ", ".join(by_task) or "nothing, because every setting is set already")
    if by_others and by_task:
        say(console, "not set", ", ".join(by_others))
    for text in row["left_out"]:
        say(console, "left out", text)
