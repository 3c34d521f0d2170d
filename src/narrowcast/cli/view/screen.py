"""Where output goes: a terminal with colours and a moving bar, or plain lines anywhere else."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.cli.output import outlive_output

PAPER_WIDTH = 1000
"""Columns of a file or a pipe, so that nothing is folded there."""
LABEL_WIDTH = 10


def screen(*, quiet: bool = False, to_stderr: bool = False) -> Console:
    """Return the console for this process's output: stdout, unless that is for JSON alone."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(
        stderr=to_stderr,
        quiet=quiet,
        width=None if stream.isatty() else PAPER_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def lasting_screen(*, quiet: bool = False) -> Console:
    """Return the console of a run, which continues if its output is closed."""
    outlive_output()
    return screen(quiet=quiet)


def is_live(console: Console) -> bool:
    """Return whether lines that have been printed can be drawn again."""
    return console.is_interactive and not console.quiet and console.file.isatty()


def new_table() -> Table:
    """Return an empty table in the one style that all verbs print."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def say(console: Console, label: str, text: str | Text, *, style: str = "dim") -> None:
    """Print a text after a short label; labels, and texts of several lines, form columns."""
    if console.width == PAPER_WIDTH:
        console.print(Text.assemble(f"{label:<{LABEL_WIDTH}}", text))
        return
    columns = Table.grid()
    columns.add_column(width=LABEL_WIDTH, style=style)
    columns.add_column()
    columns.add_row(label, text)
    console.print(columns)


def say_command(console: Console, label: str, command: str) -> None:
    """Print a command or a path after a short label, in one piece however long, to be copied."""
    console.print(Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), command), soft_wrap=True)


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """Show that `what` is being done: on a terminal while it is, elsewhere as a line at once."""
    if is_live(console):
        with console.status(f"{what} …"):
            yield
    else:
        console.print(f"{what} …")
        yield
