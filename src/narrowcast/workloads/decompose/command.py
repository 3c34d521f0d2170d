"""`narrowcast decompose`: compare finished decompositions."""

import json

import click

from narrowcast.plain_files import expand_path


@click.group()
def decompose() -> None:
    """Compare finished decompositions."""


@decompose.command()
@click.argument("first")
@click.argument("second")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first run."
)
@click.option(
    "--other-seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the second run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(first: str, second: str, seed: int, other_seed: int, as_json: bool) -> None:
    """Compare the alive components of two runs, site by site.

    Each component is matched to the most similar component of the other run, by the cosine of
    their rank-one matrices. MMCS is the mean of these cosines. It is 1 if both runs have the same
    components.
    """
    from narrowcast.workloads.decompose.component_files import likeness, read_components

    one = read_components(expand_path(first), seed=seed)
    other = read_components(expand_path(second), seed=other_seed)
    rows = likeness(one, other)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["site"]) for row in rows)
    click.echo(f"{'site':{width}}  alive      MMCS of the first and second run, cosine above 0.9")
    for row in rows:
        alive = f"{row['alive'][0]}, {row['alive'][1]}"
        click.echo(
            f"{row['site']:{width}}  {alive:9}  {row['mmcs'][0]:.4f}  {row['mmcs'][1]:.4f}  "
            f"{row['found'][0]} of {row['alive'][0]}"
        )
