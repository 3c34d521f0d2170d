"""The tables of `bench step` and `bench models`, and why some rows are missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.bench.figures import result_rows
from narrowcast.bench.rounds import Figures
from narrowcast.bench.zoo.running import Zoo
from narrowcast.bench.zoo.ways import AMP
from narrowcast.cli.view.screen import new_table
from narrowcast.report.phrases import large, size

GIB = 2**30
TEXT_COLUMNS = ("contender", "model", "way", "mode")


def print_figures(console: Console, figures: Figures) -> None:
    """Print the table of `bench step`."""
    rows = result_rows(figures.results, baseline=figures.baseline)
    units = list(dict.fromkeys(unit for row in rows for unit in row.rates))
    rates = [f"{unit}/s" for unit in units]
    table = _table(["contender", "ms", "quartiles", "speed", *rates, "peak", "first step"])
    for row in rows:
        low, high = row.quartiles
        first = row.facts.get("first_step_seconds")
        table.add_row(
            row.name,
            f"{1000 * row.median_seconds:.2f}",
            f"{1000 * low:.2f}–{1000 * high:.2f}",
            "" if row.speed is None else f"{row.speed:.3f} ×",
            *(large(row.rates[unit]) if unit in row.rates else "" for unit in units),
            size(row.peak_bytes),
            "" if first is None else f"{first:.1f} s",
        )
    data = figures.data
    command = " ".join([data["recipe"], *data["overrides"]])
    torch_version = data["environment"]["torch"]
    _print(
        console,
        f"bench step · {command} · {data['device']} · torch {torch_version} · baseline "
        f"{figures.baseline.name}",
        table,
    )
    for row in rows:
        if row.facts.get("note"):
            console.print(Text(f"{row.name}: {row.facts['note']}", style="yellow"))
    for result in figures.results:
        if result.failure:
            console.print(Text.assemble((result.contender.name, "bold"), f"  {result.failure}"))


def print_models(console: Console, zoo: Zoo) -> None:
    """Print the table of `bench models`, rows that failed, and what was left out."""
    data = zoo.data
    rows = data["rows"]
    table = _table(["model", "way", "mode", "ms", "× AMP", "GiB", "first step", "loss after 30"])
    previous = ""
    for row in (row for row in rows if not row["failure"]):
        speed = speed_against_amp(row, rows)
        table.add_row(
            row["model"] if row["model"] != previous else "",
            row["way"],
            row["mode"],
            f"{row['ms']:.2f}",
            "" if speed is None else f"{speed:.3f}",
            f"{row['peak_bytes'] / GIB:.2f}",
            f"{row['first_step_seconds']:.1f} s{'' if _set_up_alone(row) else ' *'}",
            f"{float(row['loss']):.4f}",
        )
        previous = row["model"]
    title = f"bench models · {data['device']} · torch {data['torch']} · baseline torch AMP"
    _print(console, title, table)
    for row in (row for row in rows if row["failure"]):
        name = f"{row['model']}, {row['way']}, {row['mode']}"
        console.print(Text.assemble((name, "bold"), f"  {row['failure']}"))
    notes = {
        "graphed rows are compared with eager AMP": any(row["mode"] == "graphed" for row in rows),
        "* set up in parallel (--together), so first-step times cannot be compared": any(
            not _set_up_alone(row) for row in rows
        ),
    }
    for note, applies in notes.items():
        if applies:
            console.print(Text(note, style="dim"))
    if zoo.left_out:
        names = "; ".join(str(trial) for trial in zoo.left_out)
        console.print(Text(f"left out, {len(zoo.left_out)} rows: {names}", style="yellow"))


def speed_against_amp(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the speed against torch AMP in the same mode; of a graph, against eager AMP."""
    mode = "eager" if row["mode"] == "graphed" else row["mode"]
    amp = (row["model"], AMP, mode)
    theirs = next((r for r in rows if (r["model"], r["way"], r["mode"]) == amp), None)
    if theirs is None or theirs["failure"] or row["failure"]:
        return None
    return float(theirs["ms"] / row["ms"])


def _set_up_alone(row: Mapping[str, Any]) -> bool:
    return bool(row.get("together", 1) == 1)  # older files do not have it


def _table(columns: Sequence[str]) -> Table:
    table = new_table()
    for name in columns:
        justify: Any = "left" if name in TEXT_COLUMNS else "right"
        table.add_column(name, justify=justify, overflow="fold")
    return table


def _print(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)
