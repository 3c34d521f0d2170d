"""`narrowcast recipes`: what can be trained without writing a file."""

import click


@click.command()
def recipes() -> None:
    """List the recipes there are, one line each."""
    from narrowcast.workloads import REGISTRY, shipped_recipes

    found = shipped_recipes()
    width = max((len(name) for name, _ in found), default=0)
    for name, description in found:
        click.echo(f"{name:<{width}}  {description}".rstrip())
    for problem in REGISTRY.problems():
        click.echo(f"narrowcast: {problem}", err=True)
