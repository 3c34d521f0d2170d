"""`narrowcast tutorial`: a numeral by itself."""

import click

from narrowcast.workloads.tutorial.roman import roman


@click.command()
@click.argument("number", type=click.IntRange(1, 3999))
def tutorial(number: int) -> None:
    """Write NUMBER as the Romans did."""
    click.echo(roman(number))
