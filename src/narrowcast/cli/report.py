"""`narrowcast report` and `narrowcast compare`: the page of a run, and runs side by side."""

from typing import TYPE_CHECKING

import click

from narrowcast.cli.options import json_option, run_argument

if TYPE_CHECKING:
    from narrowcast.report.compare.comparison import Comparison


@click.command()
@run_argument
def report(folder: str) -> None:
    """Rewrite DIR/report.html from the records in DIR."""
    from narrowcast.runner.report_sections import write_run_report

    click.echo(str(write_run_report(folder)))


@click.command()
@click.argument("folders", metavar="DIR DIR...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--metric",
    help=(
        "Metric to compare by.  [default: the task's first metric that every run has] Write "
        "loss/NAME for a part of the training loss."
    ),
)
@click.option(
    "--target",
    type=float,
    help=(
        "Report the time each run takes to reach this value.  [default: the best value that "
        "every run reached]"
    ),
)
@click.option("--html", "page", metavar="FILE", type=click.Path(), help="Also write an HTML page.")
@json_option
def compare(
    folders: tuple[str, ...],
    *,
    metric: str | None,
    target: float | None,
    page: str | None,
    as_json: bool,
) -> None:
    """Compare the runs in two or more folders.

    Runs that differ only in the seed form one group, with a confidence interval over the seeds.
    """
    from narrowcast.report.compare.comparison import compare as compare_runs
    from narrowcast.runs import strict_json

    comparison = compare_runs(folders, metric=metric, target=target)
    if as_json:
        click.echo(strict_json.dumps(comparison.to_json(), indent=2))
    else:
        _print_comparison(comparison)
    if page is not None:
        from narrowcast.report.compare.page import write_comparison

        written = write_comparison(comparison, page)
        if not as_json:
            click.echo(str(written))


def _print_comparison(comparison: "Comparison") -> None:
    """Print the headline, the table and the notes of a comparison."""
    from rich.text import Text

    from narrowcast.cli.view.screen import new_table, say, screen
    from narrowcast.report.compare.comparison import INTERVAL
    from narrowcast.report.compare.rows import headline, rows, titles

    console = screen()
    console.print(Text(headline(comparison), style="bold"))
    console.print()
    table = new_table()
    table.add_column("runs", overflow="fold")
    fields = titles(comparison)
    for title in ("seeds", *fields.values()):
        table.add_column(title, justify="right")
    for row in rows(comparison):
        cells = (row[field] for field in ("label", "seeds", *fields))
        table.add_row(*cells, style="bold" if row["best"] else "")
    console.print(table)
    console.print()
    if any(len(group.seeds) > 1 for group in comparison.groups):
        say(console, "±", INTERVAL)
    say(console, "seconds", "time spent in training steps, excluding evaluations and checkpoints")
    for note in comparison.notes:
        say(console, "note", Text(note, style="yellow"))
