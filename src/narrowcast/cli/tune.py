"""`narrowcast tune`: the fastest policy for a recipe under a budget, with a reason per layer."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from narrowcast.cli.options import json_option, overrides_argument, quiet_option, recipe_argument
from narrowcast.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from narrowcast.tuning.result import TuneResult

TERMS = ("loss", "memory", "time")
LINE_SECONDS = 10.0
"""Between two lines of progress where none can be overwritten."""


@click.command()
@recipe_argument
@overrides_argument
@click.option(
    "--budget",
    multiple=True,
    metavar="TERM",
    help="Limits: loss=0.5%, memory=20GiB, time=12ms or time=80%.  [default: loss=1%]",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Write the policy file here, and a page with the same name and .html.",
)
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Batches that measure the error of updates.",
)
@click.option(
    "--check-steps",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="Steps of the check run; 0: no check run.",
)
@json_option
@quiet_option
def tune(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    budget: tuple[str, ...],
    output: str | None,
    batches: int,
    check_steps: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find the fastest policy for RECIPE under a budget.

    Measures how far 8-bit and 16-bit formats move the update of each group of layers, adds the
    time that they save, and searches exactly. A short check run confirms or withdraws the choice.
    hardware=h200 tunes for a GPU that this machine does not have; a wrong name lists all. Train
    with the result by precision.policy=@FILE.
    """
    from narrowcast.workloads import load_recipe

    terms = [each for each in overrides if each.partition("=")[0] in TERMS]
    gpus = [each.partition("=")[2] for each in overrides if each.startswith("hardware=")]
    rest = [each for each in overrides if each not in terms and not each.startswith("hardware=")]
    loaded = load_recipe(recipe, rest)
    target = None if output is None else _checked_output(output)

    from narrowcast.cli.view.screen import screen
    from narrowcast.runner.tune import tune_recipe
    from narrowcast.runs import strict_json

    progress = _Progress(screen(quiet=quiet or as_json, to_stderr=True))
    with progress:
        result = tune_recipe(
            loaded,
            budget=[*budget, *terms] or "loss=1%",
            hardware=gpus[-1] if gpus else None,
            measure_batches=batches,
            check_steps=check_steps,
            progress=progress.show,
        )
    if target is not None:
        from narrowcast.report.tuning_page import write_tuning_page

        result.save(target)
        write_tuning_page(result, target.with_suffix(".html"))
    if as_json:
        click.echo(strict_json.dumps(result.to_json(), indent=2))
    elif not quiet:
        _print(screen(), result, target=target, recipe=recipe)


def _checked_output(text: str) -> Path:
    """Return the path of the policy file, or raise before anything is measured."""
    path = Path(text).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output must name a .yaml file, got {text!r}. Write -o policy.yaml.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {str(path.parent)!r}. Create it first.")
    return path


class _Progress:
    """Shows what is measured: on one line of a terminal, elsewhere as a line now and then."""

    def __init__(self, console: "Console") -> None:
        from narrowcast.cli.view.screen import is_live

        self._console, self._due = console, 0.0
        self._status = console.status("tuning …") if is_live(console) else None

    def __enter__(self) -> None:
        if self._status is not None:
            self._status.start()

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, line: str) -> None:
        """Show one line."""
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() >= self._due:
            self._console.print(line)
            self._due = time.monotonic() + LINE_SECONDS


def _print(console: "Console", result: "TuneResult", *, target: Path | None, recipe: str) -> None:
    from rich.text import Text

    from narrowcast.cli.view.screen import new_table, say, say_command
    from narrowcast.precision.plan.policy import short_text
    from narrowcast.tuning.result import milliseconds, percent

    table = new_table()
    for column in ("layers", "formats"):
        table.add_column(column, no_wrap=True)
    for column in ("loses", "time"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("reason", style="dim")
    for group in result.groups:
        times = f" ×{len(group.layers)}" if len(group.layers) > 1 else ""
        table.add_row(
            group.label + times,
            group.chosen,
            percent(group.cost.lost),
            milliseconds(group.cost.seconds),
            group.reason,
        )
    console.print(table)
    console.print()
    for line in result.lines:
        console.print(line)
    console.print()
    say(console, "policy", Text(short_text(result.policy), style="bold"))
    if target is not None:
        say_command(console, "written", f"{target} and {target.with_suffix('.html')}")
        say_command(console, "next", f"narrowcast train {recipe} precision.policy=@{target}")
