"""`narrowcast recipes` and `narrowcast schema`: the shipped recipes, and what a recipe may have."""

import click


@click.command()
def recipes() -> None:
    """List the shipped recipes."""
    from narrowcast.workloads import REGISTRY, shipped_recipes

    matches = shipped_recipes()
    width = max((len(name) for name, _ in matches), default=0)
    for name, description in matches:
        click.echo(f"{name:<{width}}  {description}".rstrip())
    for problem in REGISTRY.problems():
        click.echo(f"narrowcast: {problem}", err=True)


@click.command()
def schema() -> None:
    """Print the JSON schema of recipes."""
    import json

    from narrowcast.config import recipe_schema
    from narrowcast.errors import NarrowcastError
    from narrowcast.workloads import REGISTRY, workload_sections

    known = {}
    for workload in REGISTRY.workloads():
        try:
            known[workload.name] = workload_sections(workload.name)
        except NarrowcastError as error:  # of a broken installed workload
            click.echo(f"narrowcast: {error}", err=True)
    click.echo(json.dumps(recipe_schema(known), indent=2))
