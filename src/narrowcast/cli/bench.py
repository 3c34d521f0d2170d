"""`narrowcast bench`: policies and peers, measured side by side in processes of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from narrowcast.cli.bench_models import models
from narrowcast.cli.options import overrides_argument, quiet_option
from narrowcast.errors import Interrupted

STDOUT = "-"

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure policies and peers side by side.

    Every contender runs in a process of its own. All compile at the same time; then they are
    measured one at a time, in turns (models: one after another). A contender that cannot run says
    why.
    """


def _checked_json(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Refuse what is a recipe or a setting rather than a file: --json takes the next word."""
    if given is None or given == STDOUT:
        return given
    if given.endswith(".json"):
        if not Path(given).parent.is_dir():  # told now, not when all has been measured
            raise click.BadParameter(f"there is no folder {str(Path(given).parent)!r}; make it")
        return given
    raise click.BadParameter(f"{given!r} does not end in .json; put --json last, or name a file")


def _options(default_recipe: str) -> Callable[[_Command], _Command]:
    """Return the words and options that all benches share."""

    def decorate(command: _Command) -> _Command:
        for add in reversed(
            (
                click.argument("recipe", default=default_recipe),
                overrides_argument,
                click.option("--peers", metavar="A,B,…", help="Peers by name; all; or none."),
                click.option(
                    "--policies", metavar="'P | Q | …'", help="Policies, with | between; or none."
                ),
                click.option("--baseline", metavar="NAME", help="Whom ratios are against."),
                click.option(
                    "--together",
                    type=click.IntRange(1),
                    help="Contenders on the device at once.  [default: as many as fit]",
                ),
                click.option(
                    "--timeout",
                    type=click.FloatRange(0, min_open=True),
                    default=900,
                    show_default=True,
                    metavar="SECONDS",
                    help="A contender that says nothing for so long is ended.",
                ),
                click.option(
                    "--warm",
                    is_flag=True,
                    help="Use the compiler caches there are; else each contender begins with none.",
                ),
                click.option(
                    "--logs",
                    metavar="DIR",
                    type=click.Path(path_type=Path),
                    help="Keep the log of each contender here.",
                ),
                click.option(
                    "--json",
                    "json_file",
                    metavar="FILE",
                    is_flag=False,
                    flag_value=STDOUT,
                    callback=_checked_json,
                    help="Write the figures to FILE.json; without a name, print them instead.",
                ),
                quiet_option,
            )
        ):
            command = add(command)
        return command

    return decorate


def _timed(command: _Command) -> _Command:
    """Add the options of benches that time steps."""
    rounds = "Rounds: everyone has a turn in each."
    repeats = click.option(
        "--repeats", type=click.IntRange(1), default=5, show_default=True, help=rounds
    )
    steps = click.option(
        "--steps",
        type=click.IntRange(1),
        default=10,
        show_default=True,
        help="Timed steps per round; of products at least so many.",
    )
    return repeats(steps(command))


@bench.command()
@_options("lm/gpt-350m")
@_timed
def step(**given: Any) -> None:
    """Time whole training steps of RECIPE.

    Everyone trains the same model on the same batches, with the recipe's optimizer and clipping.
    The table gives medians, quartiles, speed against the baseline, what the task counts (tokens,
    series) per second, peak memory, and the seconds of the first step (compilation).
    """
    _measure("step", given)


@bench.command()
@_options("lm/gpt-350m")
@_timed
def optimizer(**given: Any) -> None:
    """Time the optimizer's update alone, over the tensors of RECIPE's model.

    Unscale, norm, clip, AdamW, master weights and working copy. Bytes are what one pass over a
    contender's formats has to move; `of copy` is how near its rate comes to a plain copy. On a GPU
    `ms` is the device's time with the host ahead, `host ms` what the host takes to ask. For 500
    million parameters write model.layers=32.
    """
    _measure("optimizer", given)


@bench.command()
@_options("lm/gpt-350m")
@_timed
@click.option("--shapes", metavar="MxKxN,…", help="Tokens, in and out of each layer.")
def products(shapes: str | None, **given: Any) -> None:
    """Time one linear layer forward and backward over a sweep of shapes.

    RECIPE only says on which device.
    """
    _measure("products", given, shapes=shapes)


@bench.command()
@_options("lm/gpt-124m")
@_timed
def health(**given: Any) -> None:
    """Time what watching a run costs, against a step that only guards."""
    _measure("health", given)


@bench.command()
@_options("quickstart")
@click.option(
    "--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each policy."
)
def quality(seeds: int, **given: Any) -> None:
    """Train RECIPE in several policies, and compare how well and how soon.

    The baseline is the first policy. Time to loss is the seconds until the smoothed training loss
    is where the baseline's ends, with the same seed. With --together N runs share the device, and
    times say nothing.
    """
    _measure("quality", given, seeds=seeds)


bench.add_command(models)


def _measure(name: str, given: dict[str, Any], **settings: Any) -> None:
    """Run a bench, show how it goes and its table, and write its figures."""
    from narrowcast.workloads import load_recipe

    load_recipe(given["recipe"], given["overrides"])  # what is misspelt is told without torch
    json_file: str | None = given["json_file"]
    trains = name == "quality"  # all of it in one turn, and any number at once

    from narrowcast.bench.running import Asked, measure
    from narrowcast.cli.view.bench_table import print_figures, print_quality
    from narrowcast.cli.view.screen import screen
    from narrowcast.runs.strict_json import dumps

    console = screen(quiet=given["quiet"], to_stderr=json_file == STDOUT)
    asked = Asked(
        recipe=given["recipe"],
        overrides=given["overrides"],
        peers=given["peers"],
        policies=given["policies"],
        baseline=given["baseline"],
        repeats=given.get("repeats", 1),
        steps=given.get("steps", 1),
        together=None if trains else given["together"],
        at_once=given["together"] or 1 if trains else 1,
        timeout_seconds=given["timeout"],
        cold=not given["warm"],
        logs=given["logs"],
        settings=settings,
    )
    figures = measure(name, asked, tell=lambda line: console.print(line, style="dim"))
    (print_quality if trains else print_figures)(console, name, figures)
    if json_file == STDOUT:
        click.echo(dumps(figures.data, indent=1))
    elif json_file is not None:
        Path(json_file).write_text(dumps(figures.data, indent=1) + "\n", encoding="utf-8")
    if figures.interrupted:
        raise Interrupted("the bench was interrupted; its figures are of what was measured by then")
