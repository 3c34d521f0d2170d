"""`narrowcast verify-resume`: proof that a killed and resumed run is the run it would have been."""

import click

from narrowcast.cli.options import overrides_argument, quiet_option, recipe_argument

NOT_EQUAL = 1
"""The exit code of a check that ran and found a difference, as of diff and cmp."""


@click.command("verify-resume")
@recipe_argument
@overrides_argument
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    help="Keep both runs in this folder. By default they are kept only if they differ.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Random seed that picks the step at which the run is killed.",
)
@quiet_option
def verify_resume(
    recipe: str, overrides: tuple[str, ...], out: str | None, seed: int, quiet: bool
) -> None:
    """Check that resuming a killed run is bit-exact.

    Trains RECIPE twice: once without interruption, and once killed with kill -9 and resumed.

    Exits with 0 if records, weights, optimizer state, loss scale and random state are identical,
    and with 1 if anything differs.
    """
    import shutil
    import tempfile
    from pathlib import Path

    from narrowcast.cli.view.screen import screen, working
    from narrowcast.workloads import load_recipe

    loaded = load_recipe(recipe, overrides)
    console = screen(quiet=quiet)
    folder = Path(out or tempfile.mkdtemp(prefix="narrowcast-"))
    with working(console, "training twice"):
        from narrowcast.training.checkpoints.verify import verify_resume as verify

        requested = loaded.recipe
        if not requested.is_settled:
            from narrowcast.runner.assemble import assemble

            requested = assemble(requested).recipe
        check = verify(requested, [recipe, *overrides], folder=folder, seed=seed)
    where = f"step {check.resumed_from}" if check.resumed_from else "the beginning"
    course = f"killed after step {check.killed_after} of {check.steps}, resumed from {where}"
    if not check.equal:
        click.echo(
            f"narrowcast: not equal: {course}: {check.difference}. Both runs are in {folder}",
            err=True,
        )
        click.get_current_context().exit(NOT_EQUAL)
    if out is None:
        shutil.rmtree(folder)
    console.print(f"equal, bit for bit: {course}", style="green", soft_wrap=True)
