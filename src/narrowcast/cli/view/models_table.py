"""What `bench models` prints at the end: a table of the rows, and what is claimed of them."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from narrowcast.bench.zoo.bars import counterpart, set_up_alone, speed_against_amp
from narrowcast.bench.zoo.running import Zoo
from narrowcast.cli.view.bench_table import new_table

GIB = 2**30


def print_models(console: Console, zoo: Zoo) -> None:
    """Print rows, rows that failed, verdicts, and what was left out."""
    data = zoo.data
    rows = data["rows"]
    console.print()
    title = f"bench models · {data['device']} · torch {data['torch']} · against torch AMP"
    console.print(Text(title, style="bold"))
    table = new_table(["model", "way", "mode", "ms", "× AMP", "GiB", "first step", "loss after 30"])
    shown = ""
    for row in (row for row in rows if not row["failure"]):
        speed = speed_against_amp(row, rows)
        table.add_row(
            row["model"] if row["model"] != shown else "",
            row["way"],
            row["mode"],
            f"{row['ms']:.2f}",
            "" if speed is None else f"{speed:.3f}",
            f"{row['peak_bytes'] / GIB:.2f}",
            f"{row['first_step_seconds']:.1f} s{'' if set_up_alone(row) else ' *'}",
            f"{float(row['loss']):.4f}",
        )
        shown = row["model"]
    console.print(table)
    for row in (row for row in rows if row["failure"]):
        who = f"{row['model']}, {row['way']}, {row['mode']}"
        console.print(Text.assemble((who, "bold"), f"  {row['failure']}"))
    if any(counterpart(row)[1] != row["mode"] for row in rows):
        console.print(Text("graphed rows are against eager AMP", style="dim"))
    if not all(set_up_alone(row) for row in rows):
        told = "* set up beside others (--together): such a first step is not comparable or judged"
        console.print(Text(told, style="dim"))
    _print_verdicts(console, data)
    if zoo.left_out:
        told = "; ".join(str(trial) for trial in zoo.left_out)
        console.print(Text(f"left out, {len(zoo.left_out)} rows: {told}", style="yellow"))


def _print_verdicts(console: Console, data: Mapping[str, Any]) -> None:
    """Print what is claimed, and whether it is so."""
    if not data["judged"]:
        console.print(Text("tiny models or a CPU: claims of speed are not judged", style="dim"))
        return
    if not data["cold_caches"]:
        console.print(Text("caches were warm: first steps are not judged", style="dim"))
    found = data["verdicts"]
    if not found:
        return
    table = new_table(["case", "found", "bar", "verdict"])
    for each in found:
        holds = each["holds"]
        verdict = Text("holds", style="green") if holds else Text("falls short", style="red")
        table.add_row(each["what"], f"{each['found']:.3f}", each["bar"], verdict)
    console.print(table)
    held = sum(each["holds"] for each in found)
    console.print(Text(f"{held} of {len(found)} hold", style="bold"))
