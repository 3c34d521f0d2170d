"""The tables that a profiled run ends with: the most expensive operations and modules."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowcast.cli.view.screen import new_table, say, say_command
from narrowcast.hardware.profile import FOLDER, SUMMARY, TRACE
from narrowcast.report.phrases import count


def print_profile(console: Console, folder: Path) -> None:
    """Print what the profiled steps of a run took; nothing if there were none."""
    path = folder / FOLDER / SUMMARY
    if not path.is_file():
        return
    summary = json.loads(path.read_text(encoding="utf-8"))
    where = "device" if summary["device"] == "cuda" else "host"
    steps = count(summary["steps"], "profiled step")
    console.print()
    say(console, "profile", f"{summary['ms']:.1f} ms of {where} time per step, over {steps}")
    _print_rows(console, "operation", summary["operations"])
    if summary["modules"]:
        _print_rows(console, "module", summary["modules"])
    else:
        say(
            console,
            "note",
            "modules are not known in compiled steps and CUDA graphs; write compile=false "
            "cuda_graph=false to see them",
        )
    say_command(console, "trace", str(folder / FOLDER / TRACE))


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    roofline = any(row["roofline"] is not None for row in rows)
    table = new_table()
    table.add_column(title, no_wrap=True, overflow="ellipsis")
    names = ["ms", "share", *(["forward", "backward"] if title == "module" else ["calls"])]
    for name in [*names, *(["of roofline"] if roofline else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row["name"], f"{row['ms']:.2f}", f"{row['share']:.1%}"]
        if title == "module":
            cells += [f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}"]
        else:
            cells.append(f"{row['calls']:g}")
        if roofline:
            cells.append("–" if row["roofline"] is None else f"{row['roofline']:.0%}")
        table.add_row(*cells)
    console.print(table)
