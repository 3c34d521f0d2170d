"""`narrowcast tutorial`: print a Roman numeral."""

import click

from narrowcast.workloads.tutorial.roman import roman


@click.command()
@click.argument("number", type=click.IntRange(1, 3999))
def tutorial(number: int) -> None:
    """Print NUMBER as a Roman numeral."""
    click.echo(roman(number))
