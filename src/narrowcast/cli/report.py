"""`narrowcast report` and `narrowcast compare`: the page of a run, and runs side by side."""

import click

from narrowcast.cli.options import json_option, run_argument


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
        from narrowcast.cli.view.compare_table import print_comparison
        from narrowcast.cli.view.screen import screen

        print_comparison(screen(), comparison)
    if page is not None:
        from narrowcast.report.compare.page import write_comparison

        written = write_comparison(comparison, page)
        if not as_json:
            click.echo(str(written))
