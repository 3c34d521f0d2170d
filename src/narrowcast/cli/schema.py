"""`narrowcast schema`: what a recipe may say, for editors that complete and check it."""

import click


@click.command()
def schema() -> None:
    """Print the JSON schema of recipes."""
    import json

    from narrowcast.config import recipe_schema
    from narrowcast.workloads import REGISTRY, sections_of

    known = {workload.name: sections_of(workload.name) for workload in REGISTRY.workloads()}
    click.echo(json.dumps(recipe_schema(known), indent=2))
