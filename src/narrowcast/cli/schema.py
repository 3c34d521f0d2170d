"""`narrowcast schema`: what a recipe may say, for editors that complete and check it."""

import click


@click.command()
def schema() -> None:
    """Print the JSON schema of recipes."""
    import json

    from narrowcast.config import recipe_schema
    from narrowcast.workloads import WORKLOADS, sections_of

    click.echo(json.dumps(recipe_schema({name: sections_of(name) for name in WORKLOADS}), indent=2))
