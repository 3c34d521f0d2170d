"""`narrowcast report`: the page of a run, made again from its folder."""

import click

from narrowcast.cli.options import run_argument


@click.command()
@run_argument
def report(folder: str) -> None:
    """Write DIR/report.html again, from the records in DIR."""
    from narrowcast.report import write_report

    click.echo(str(write_report(folder)))
