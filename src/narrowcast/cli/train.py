"""`narrowcast train`, `resume` and `verify-resume`: runs from recipe or checkpoint to report."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from narrowcast.cli.options import overrides_argument, quiet_option, recipe_argument, run_argument
from narrowcast.errors import ConfigError, NarrowcastError

if TYPE_CHECKING:
    from rich.console import Console

    from narrowcast.config import LoadedRecipe
    from narrowcast.config.common_sections import ParallelSection
    from narrowcast.training.parallel import RunRanks

NOT_EQUAL = 1
"""The exit code of a check that ran and found a difference, as of diff and cmp."""


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
    from narrowcast.cli.view.screen import lasting_screen
    from narrowcast.workloads import load_recipe

    if out is not None:
        # A shell leaves ~ as it is in --out=~/runs, and gives nothing for a variable that is unset.
        if not out.strip():
            raise ConfigError(
                "--out must name a folder, got an empty string. Name one, or leave --out out"
            )
        out = str(Path(out).expanduser())
    loaded = load_recipe(recipe, overrides)
    with _ranks(loaded.recipe.parallel, device=loaded.recipe.device) as ranks:
        from narrowcast.runner.launch import folder_before_restart

        console = lasting_screen(quiet=quiet or not ranks.is_main)
        if (begun := folder_before_restart(ranks, out)) is not None:
            _resume(str(begun), (), (), console=console, ranks=ranks)
        else:
            _train(loaded, out, console=console, ranks=ranks)


@contextlib.contextmanager
def _ranks(settings: ParallelSection, *, device: str) -> Iterator[RunRanks]:
    """Join the ranks of a run; start them if the settings say so, and exit when they have ended.

    Of an error that all ranks have, rank 0 prints the message.
    """
    from narrowcast.runner.launch import has_to_start, start_ranks
    from narrowcast.training.parallel import join

    if has_to_start(settings):
        raise Exit(start_ranks(sys.argv[1:], settings))
    ranks = join(settings, device=device)
    try:
        with ranks.ending_together():
            yield ranks
    except NarrowcastError as error:
        if ranks.is_main:
            raise
        if ranks.is_said_by_main(error):
            raise Exit(error.exit_code) from error
        error.args = (f"rank {ranks.rank}: {error}", *error.args[1:])
        raise
    finally:
        ranks.close()


def _train(loaded: LoadedRecipe, out: str | None, *, console: Console, ranks: RunRanks) -> None:
    from narrowcast.cli.view.screen import say, working
    from narrowcast.runner.out_dir import out_dir

    with (
        out_dir(loaded.recipe.name, out) if ranks.is_main else contextlib.nullcontext() as place,
        working(console, "building the model"),
    ):
        from narrowcast.cli.run_loop import introduce, run_loop
        from narrowcast.cli.view.plan_view import print_strategy, print_task_row
        from narrowcast.runner.assemble import strategy_row
        from narrowcast.runner.run import start as start_run

        path = ranks.from_main(None if place is None else place.path)
        ready = start_run(loaded, out=path, ranks=ranks)
    with ready as run:
        introduce(
            console,
            run.recipe,
            plan=run.plan,
            notes=run.task.info.notes,
            folder=str(place),
            ranks=ranks.size,
        )
        if run.task_row is not None:
            print_task_row(console, run.task_row)
        print_strategy(console, strategy_row(run.recipe, run.plan))
        for notice in run.notices:
            say(console, "note", notice, style="yellow")
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
    folder. KEY=VALUE may set steps, device, checkpoint.*, eval.*, memory.*, parallel.*,
    data.workers, data.prefetch and trackers. If data, settings or records do not match the
    checkpoint, the command stops with an error.
    """
    from narrowcast.cli.output import outlive_output
    from narrowcast.cli.view.screen import lasting_screen, working

    # One of several ranks does not know here whether it is rank 0, which prints.
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    console = lasting_screen(quiet=quiet or rank != "0")
    with working(console, "loading the run"):
        from narrowcast.cli.run_loop import already_done
        from narrowcast.runner.finished import finished

        end = None if accept else finished(folder, overrides)
    if end:
        outlive_output(False)  # there is no run to keep alive, only an answer
        already_done(console, Path(folder), end=end)
        return
    from narrowcast.runner.launch import parallel_settings

    with _ranks(parallel_settings(folder, overrides), device="auto") as ranks:
        _resume(folder, overrides, accept, console=console, ranks=ranks)


def _resume(
    folder: str,
    overrides: tuple[str, ...],
    accept: tuple[str, ...],
    *,
    console: Console,
    ranks: RunRanks,
) -> None:
    from narrowcast.cli.run_loop import introduce, run_loop
    from narrowcast.cli.view.screen import say
    from narrowcast.runner.run import start_again

    ready = start_again(folder, overrides, accept=accept, ranks=ranks)
    with ready as run:
        introduce(
            console,
            run.recipe,
            plan=run.plan,
            notes=run.task.info.notes,
            folder=folder,
            ranks=ranks.size,
        )
        step = run.resumed_from
        say(
            console,
            "from",
            f"step {step}" if step else "the beginning, because there is no checkpoint yet",
        )
        for notice in run.notices:
            say(console, "note", notice, style="yellow")
        run_loop(run, console=console)


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
