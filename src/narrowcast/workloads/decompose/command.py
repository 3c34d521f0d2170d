"""`narrowcast decompose`: compare and explain finished decompositions."""

import json
import sys
from pathlib import Path

import click

from narrowcast.plain_files import expand_path


@click.group()
def decompose() -> None:
    """Compare and explain finished decompositions."""


@decompose.command()
@click.argument("first")
@click.argument("others", metavar="OTHER...", nargs=-1, required=True)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first run."
)
@click.option(
    "--other-seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the other runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(first: str, others: tuple[str, ...], seed: int, other_seed: int, as_json: bool) -> None:
    """Compare the alive components of two or more runs, site by site.

    Each component is matched to the most similar component of the other run, by the cosine of
    their rank-one matrices. MMCS is the mean of these cosines. It is 1 if both runs have the same
    components. Chance is the MMCS of as many random components.
    """
    from narrowcast.workloads.decompose.component_files import (
        agreement,
        likeness,
        read_components,
    )

    one = read_components(expand_path(first), seed=seed)
    rest = [read_components(expand_path(other), seed=other_seed) for other in others]
    rows = likeness(one, rest[0]) if len(rest) == 1 else agreement([one, *rest])
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["site"]) for row in rows)
    if len(rest) > 1:
        click.echo(f"{'site':{width}}  mean MMCS  lowest  chance  first's in all  alive")
        for row in rows:
            click.echo(
                f"{row['site']:{width}}  {row['mmcs']:9.4f}  {row['lowest']:.4f}  "
                f"{row['chance']:.4f}  {row['in_all']:4} of {row['alive'][0]:<6}  "
                f"{', '.join(map(str, row['alive']))}"
            )
        return
    click.echo(
        f"{'site':{width}}  alive      MMCS of the first and second run, cosine above 0.9, chance"
    )
    for row in rows:
        alive = f"{row['alive'][0]}, {row['alive'][1]}"
        click.echo(
            f"{row['site']:{width}}  {alive:9}  {row['mmcs'][0]:.4f}  {row['mmcs'][1]:.4f}  "
            f"{row['found'][0]} of {row['alive'][0]}, {row['chance'][0]:.4f}"
        )


@decompose.command()
@click.argument("run")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--tokens", default=16384, show_default=True, help="Tokens of text to read.")
@click.option("--examples", default=6, show_default=True, help="Contexts per component.")
@click.option(
    "--effect-windows",
    default=2,
    show_default=True,
    help="Windows per component to measure its effect on; 0: none.",
)
@click.option(
    "--attributed",
    default=256,
    show_default=True,
    help="Components whose sources are measured, the most important ones; 0: none.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, … or auto.")
@click.option("--out", type=click.Path(), help="Folder for the files.  [default: RUN]")
def harvest(
    run: str,
    settings: tuple[str, ...],
    tokens: int,
    examples: int,
    effect_windows: int,
    attributed: int,
    device: str,
    out: str | None,
) -> None:
    """Measure what each component of a decomposed language model does.

    Writes harvest.json and harvest.html, a page to browse. For each component they have the tokens
    and contexts where it is important, how often it is active, how the loss changes when it alone
    is off, and which components it reads. KEY=VALUE changes a setting of the run, such as
    data.text=[FILE] for other text.
    """
    from narrowcast.workloads.decompose.harvest import HarvestSettings, harvest, write_harvest
    from narrowcast.workloads.decompose.loading import load

    how = HarvestSettings(
        tokens=tokens, examples=examples, effect_windows=effect_windows, attributed=attributed
    )
    path = expand_path(run)
    folder = path if out is None else expand_path(out)
    loaded = load(path, settings, device=device)
    if out is not None:
        folder.mkdir(parents=True, exist_ok=True)
    result = harvest(loaded, how, on_progress=_progress if sys.stderr.isatty() else None)
    for written in write_harvest(Path(folder), result):
        click.echo(written)


def _progress(phase: str, done: int, size: int) -> None:
    click.echo(f"\r{phase} {done:,} of {size:,}\033[K", nl=done == size, err=True)
