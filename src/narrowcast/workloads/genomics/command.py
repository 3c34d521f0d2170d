"""`narrowcast genomics`: a base of your own, predictions, and scores of variants."""

import click


@click.group()
def genomics() -> None:
    """Train a base on genomes, predict with a finished run, and score variants."""
