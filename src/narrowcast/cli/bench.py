"""`narrowcast bench`: policies and peers, measured side by side in processes of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from narrowcast.cli.options import overrides_argument, quiet_option
from narrowcast.errors import Interrupted

STDOUT = "-"
LISTS = ("--only", "--ways", "--modes")
"""Options of `bench models` that take words until the next option."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure policies and peers side by side.

    Every contender runs in a process of its own and is timed while no other does anything. A
    contender that cannot run says why.
    """


def _checked_json(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Raise for a recipe or a setting in place of a file: --json takes the next word."""
    if value is None or (value == STDOUT and context.info_name == "step"):
        return value
    if not value.endswith(".json"):
        hint = "; put --json last, or name a file" if context.info_name == "step" else ""
        raise click.BadParameter(f"{value!r} does not end in .json{hint}")
    if not Path(value).parent.is_dir():  # raised now, not after everything is measured
        raise click.BadParameter(f"there is no folder {str(Path(value).parent)!r}; make it")
    return value


def _seconds_option(
    name: str, *, default: float | None = None, text: str
) -> Callable[[_Command], _Command]:
    return click.option(
        name,
        type=click.FloatRange(0, min_open=True),
        default=default,
        show_default=default is not None,
        metavar="SECONDS",
        help=text,
    )


warm_option = click.option(
    "--warm", is_flag=True, help="Share the compiler caches on disk; by default they begin empty."
)
logs_option = click.option(
    "--logs", metavar="DIR", type=click.Path(path_type=Path), help="Keep the logs here."
)


@bench.command()
@click.argument("recipe", default="lm/gpt-350m")
@overrides_argument
@click.option("--peers", metavar="A,B,…", help="Peers by name; all; or none.")
@click.option("--policies", metavar="'P | Q | …'", help="Policies, with | between; or none.")
@click.option("--baseline", metavar="NAME", help="Baseline for the reported speedups.")
@click.option(
    "--together",
    type=click.IntRange(1),
    help="Contenders on the device at once.  [default: as many as fit]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Rounds; everyone has a turn in each.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Timed steps per round.",
)
@_seconds_option("--timeout", default=900, text="End a contender without an answer for so long.")
@warm_option
@logs_option
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    is_flag=False,
    flag_value=STDOUT,
    callback=_checked_json,
    help="Write the figures to FILE.json; without a name, print them instead.",
)
@quiet_option
def step(json_file: str | None, quiet: bool, timeout: float, warm: bool, **settings: Any) -> None:
    """Time whole training steps of RECIPE.

    Everyone trains the same model on the same batches, with the recipe's optimizer and clipping.
    The table has medians, quartiles, speed against the baseline, items (tokens, series) per second,
    peak memory, and the seconds of the first step (compilation).
    """
    from narrowcast.workloads import load_recipe

    load_recipe(settings["recipe"], settings["overrides"])  # raises for typos before torch loads

    from narrowcast.bench.rounds import BenchRequest, measure_steps
    from narrowcast.cli.view.bench_table import print_figures
    from narrowcast.cli.view.screen import screen
    from narrowcast.runs.strict_json import dumps

    console = screen(quiet=quiet, to_stderr=json_file == STDOUT)
    request = BenchRequest(timeout_seconds=timeout, cold=not warm, **settings)
    figures = measure_steps(request, log=lambda line: console.print(line, style="dim"))
    print_figures(console, figures)
    if json_file == STDOUT:
        click.echo(dumps(figures.data, indent=1))
    elif json_file is not None:
        Path(json_file).write_text(dumps(figures.data, indent=1) + "\n", encoding="utf-8")
    if figures.interrupted:
        raise Interrupted("the bench was interrupted; its figures are of what was measured by then")


class _WithLists(click.Command):
    """A command whose lists are written `--only a b`, as well as `--only a --only b`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _repeated(args))


def _repeated(arguments: Sequence[str]) -> list[str]:
    """Repeat the name of a list before each of its words."""
    repeated: list[str] = []
    current = ""
    for word in arguments:
        if word.startswith("-"):
            current = word if word in LISTS else ""
            repeated += [] if current else [word]
        else:
            repeated += [current, word] if current else [word]
    return repeated


@bench.command(cls=_WithLists)
@click.option("--only", multiple=True, metavar="NAME ...", help="Models of the zoo by name.")
@click.option("--mine", metavar="MODULE:BUILD", help="Your own model: what build() returns.")
@click.option(
    "--ways",
    multiple=True,
    metavar="WAY ...",
    help="Some of amp, liger, torchao, ours; or single rows by name.",
)
@click.option("--modes", multiple=True, metavar="MODE ...", help="Of eager, compiled, graphed.")
@click.option("--quick", is_flag=True, help="Tiny models, on a CPU too; times mean nothing.")
@click.option(
    "--together",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Set N rows up at the same time; they are still timed one at a time.",
)
@_seconds_option("--seconds", text="Start no further row after so long; the table lists the rest.")
@_seconds_option("--timeout", default=600, text="End a row without an answer for so long.")
@warm_option
@logs_option
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=_checked_json,
    help="Save rows in FILE.json, and continue the rows that are there.",
)
@quiet_option
def models(json_file: str | None, quiet: bool, timeout: float, warm: bool, **settings: Any) -> None:
    """Train well-known models, or your own with --mine, in several ways.

    Each row has milliseconds per step, peak memory, the seconds of the first step with its
    compilation, and the loss of the thirtieth step, against torch's mixed precision in the same
    mode.
    """
    from narrowcast.bench.zoo.running import ZooRequest, measure_models
    from narrowcast.cli.view.bench_table import print_models
    from narrowcast.cli.view.screen import screen

    progress = screen(quiet=quiet, to_stderr=True)
    request = ZooRequest(
        timeout_seconds=timeout,
        cold=not warm,
        results_path=None if json_file is None else Path(json_file),
        **settings,
    )
    zoo = measure_models(request, log=lambda line: progress.print(line, style="dim"))
    print_models(screen(quiet=quiet), zoo)
    if zoo.interrupted:
        raise Interrupted("the bench was interrupted; its table is of what was measured by then")
