"""`narrowcast report`: the page of a run, made again from its folder."""

import click

from narrowcast.cli.options import run_argument


@click.command()
@run_argument
def report(folder: str) -> None:
    """Write DIR/report.html again, from the records in DIR."""
    from narrowcast.runner.report_sections import write_run_report

    click.echo(str(write_run_report(folder)))
