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
    """Benchmark policies against other libraries.

    Each contender runs in its own process and is timed while the others are idle. The table shows
    why a contender could not run.
    """


def _checked_json(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Raise for a recipe or a setting in place of a file: --json takes the next word."""
    if value is None or (value == STDOUT and context.info_name == "step"):
        return value
    if not value.endswith(".json"):
        hint = ". Put --json last, or name a file" if context.info_name == "step" else ""
        raise click.BadParameter(f"the file must end in .json, got {value!r}{hint}")
    if not Path(value).parent.is_dir():  # raised now, not after everything is measured
        raise click.BadParameter(f"there is no folder {str(Path(value).parent)!r}. Create it first")
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
    "--warm",
    is_flag=True,
    help="Reuse the compiler caches on disk. By default every contender starts with empty caches.",
)
logs_option = click.option(
    "--logs", metavar="DIR", type=click.Path(path_type=Path), help="Save the logs in this folder."
)


@bench.command()
@click.argument("recipe", default="lm/gpt-350m")
@overrides_argument
@click.option("--peers", metavar="A,B,…", help="Comma-separated peers, all, or none.")
@click.option("--policies", metavar="'P | Q | …'", help="Policies separated by |, or none.")
@click.option("--baseline", metavar="NAME", help="Baseline for the reported speedups.")
@click.option(
    "--together",
    type=click.IntRange(1),
    help="Number of contenders set up on the device at once.  [default: as many as fit]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of rounds. Each contender is timed once per round.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Timed steps per round.",
)
@_seconds_option(
    "--timeout", default=900, text="Stop a contender that does not respond for this long."
)
@warm_option
@logs_option
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    is_flag=False,
    flag_value=STDOUT,
    callback=_checked_json,
    help="Write the results to FILE.json. Without a file name, print JSON instead of the table.",
)
@quiet_option
def step(json_file: str | None, quiet: bool, timeout: float, warm: bool, **settings: Any) -> None:
    """Time complete training steps of RECIPE.

    All contenders train the same model on the same batches, with the recipe's optimizer and
    clipping. The table shows median and quartiles, speedup over the baseline, items (tokens,
    series) per second, peak memory, and the duration of the first step, which includes compilation.
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
        raise Interrupted(
            "the benchmark was interrupted; the results cover what was measured until then"
        )


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
@click.option("--only", multiple=True, metavar="NAME ...", help="Models to train, by name.")
@click.option("--mine", metavar="MODULE:BUILD", help="Your own model, as returned by build().")
@click.option(
    "--ways",
    multiple=True,
    metavar="WAY ...",
    help="Any of amp, liger, torchao, ours, or single rows by name.",
)
@click.option("--modes", multiple=True, metavar="MODE ...", help="Any of eager, compiled, graphed.")
@click.option(
    "--quick",
    is_flag=True,
    help="Use tiny models that also run on a CPU. Their times mean nothing.",
)
@click.option(
    "--together",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Set up N rows at the same time. They are still timed one at a time.",
)
@_seconds_option(
    "--seconds", text="Start no more rows after this time. The table lists the rows left out."
)
@_seconds_option("--timeout", default=600, text="Stop a row that does not respond for this long.")
@warm_option
@logs_option
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=_checked_json,
    help="Save rows in FILE.json. Rows already in the file are not measured again.",
)
@quiet_option
def models(json_file: str | None, quiet: bool, timeout: float, warm: bool, **settings: Any) -> None:
    """Benchmark well-known models, or your own with --mine.

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
        raise Interrupted(
            "the benchmark was interrupted; the table shows what was measured until then"
        )
