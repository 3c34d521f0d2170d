"""`narrowcast train` and `narrowcast resume`: a run from its recipe or checkpoint to its report."""

from pathlib import Path

import click

from narrowcast.cli.options import overrides_argument, quiet_option, recipe_argument, run_argument
from narrowcast.errors import ConfigError


@click.command()
@recipe_argument
@overrides_argument
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    help="Output folder, new or empty.  [default: runs/NAME, or the first free runs/NAME-2 …]",
)
@quiet_option
def train(recipe: str, overrides: tuple[str, ...], out: str | None, quiet: bool) -> None:
    """Train RECIPE, show progress, and write a report."""
    from narrowcast.cli.view.screen import lasting_screen, say, working
    from narrowcast.runner.out_dir import out_dir
    from narrowcast.workloads import load_recipe

    if out is not None:
        # A shell leaves ~ as it is in --out=~/runs, and gives nothing for a variable that is unset.
        if not out.strip():
            raise ConfigError(
                "--out must name a folder, got an empty string. Name one, or leave --out out"
            )
        out = str(Path(out).expanduser())
    loaded = load_recipe(recipe, overrides)
    console = lasting_screen(quiet=quiet)
    with out_dir(loaded.recipe.name, out) as place, working(console, "building the model"):
        from narrowcast.cli.run_loop import run_loop
        from narrowcast.cli.view.strategy import print_strategy
        from narrowcast.cli.view.summary import introduce
        from narrowcast.cli.view.task_row import print_task_row
        from narrowcast.runner.plan_json import strategy_row
        from narrowcast.runner.run import train as begin

        ready = begin(loaded, out=place.path)
    with ready as run:
        introduce(console, run.recipe, plan=run.plan, notes=run.task.info.notes, folder=str(place))
        if run.task_row is not None:
            print_task_row(console, run.task_row)
        print_strategy(console, strategy_row(run.recipe, run.plan))
        if any(module.how == "emulated" for module in run.plan.modules):
            say(
                console,
                "note",
                "emulated formats give the numbers of the real format but run slower than fp32",
            )
        run_loop(run, console=console)


@click.command()
@run_argument
@overrides_argument
@click.option(
    "--accept",
    multiple=True,
    type=click.Choice(["data", "settings", "records"]),
    help=(
        "Continue although this differs: data (other training data), settings (use those of the "
        "checkpoint instead of resolved.json), records (steps are missing from records.jsonl). "
        "May be repeated."
    ),
)
@quiet_option
def resume(folder: str, overrides: tuple[str, ...], accept: tuple[str, ...], quiet: bool) -> None:
    """Resume the run in DIR. Resuming is bit-exact.

    The run continues from its last checkpoint. Without a checkpoint it starts again in the same
    folder. KEY=VALUE may set steps, device, checkpoint.*, eval.*, memory.*, data.workers,
    data.prefetch and trackers. If data, settings or records do not match the checkpoint, the
    command stops with an error.
    """
    from narrowcast.cli.output import outlive_output
    from narrowcast.cli.view.screen import lasting_screen, say, working

    console = lasting_screen(quiet=quiet)
    with working(console, "loading the run"):
        from narrowcast.cli.run_loop import run_loop
        from narrowcast.cli.view.summary import already_done, introduce
        from narrowcast.runner.finished import finished
        from narrowcast.runner.run import resume as take_up

        if not accept and (end := finished(folder, overrides)):
            outlive_output(False)  # there is no run to keep alive, only an answer
            already_done(console, Path(folder), end=end)
            return
        ready = take_up(folder, overrides, accept=accept)
    with ready as run:
        introduce(console, run.recipe, plan=run.plan, notes=run.task.info.notes, folder=folder)
        step = run.resumed_from
        say(
            console,
            "from",
            f"step {step}" if step else ("the beginning, because there is no checkpoint yet"),
        )
        for notice in run.notices:
            say(console, "note", notice, style="yellow")
        run_loop(run, console=console)
