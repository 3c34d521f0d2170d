"""A comparison on a terminal: a row for each group of runs, and what to know of it."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.cli.view.screen import say
from narrowcast.report.compare.comparison import INTERVAL, Comparison
from narrowcast.report.compare.rows import headline, rows, titles


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the headline, the table and the notes of a comparison."""
    console.print(Text(headline(comparison), style="bold"))
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("runs", overflow="fold")
    fields = titles(comparison)
    for title in ("seeds", *fields.values()):
        table.add_column(title, justify="right")
    for row in rows(comparison):
        cells = (row.label, row.seeds, *(getattr(row, field) for field in fields))
        table.add_row(*cells, style="bold" if row.best else "")
    console.print(table)
    console.print()
    if any(len(group.seeds) > 1 for group in comparison.groups):
        say(console, "±", INTERVAL)
    say(console, "seconds", "time spent in training steps, excluding evaluations and checkpoints")
    for note in comparison.notes:
        say(console, "note", Text(note, style="yellow"))
