"""`narrowcast recipes`: what can be trained without writing a file."""

import click


@click.command()
def recipes() -> None:
    """List the shipped recipes, one line each."""
    from narrowcast.config import shipped_recipes

    found = shipped_recipes()
    width = max((len(name) for name, _ in found), default=0)
    for name, description in found:
        click.echo(f"{name:<{width}}  {description}".rstrip())
