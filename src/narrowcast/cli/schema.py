"""`narrowcast schema`: what a recipe may say, for editors that complete and check it."""

import click


@click.command()
def schema() -> None:
    """Print the JSON schema of recipes."""
    import json

    from narrowcast.config import recipe_schema
    from narrowcast.errors import NarrowcastError
    from narrowcast.workloads import REGISTRY, sections_of

    known = {}
    for workload in REGISTRY.workloads():
        try:
            known[workload.name] = sections_of(workload.name)
        except NarrowcastError as error:  # somebody else's, and no reason to have no schema
            click.echo(f"narrowcast: {error}", err=True)
    click.echo(json.dumps(recipe_schema(known), indent=2))
