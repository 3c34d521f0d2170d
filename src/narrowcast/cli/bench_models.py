"""`narrowcast bench models`: models that people know, or one's own, in every way there is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from narrowcast.cli.options import quiet_option
from narrowcast.errors import Interrupted

LISTS = ("--only", "--ways", "--modes")
"""Options that take words until the next option."""


class _WithLists(click.Command):
    """A command whose lists are written `--only a b`, as well as `--only a --only b`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _repeated(args))


def _repeated(words: Sequence[str]) -> list[str]:
    """Say the name of a list before each of its words."""
    said: list[str] = []
    current = ""
    for word in words:
        if word.startswith("-"):
            current = word if word in LISTS else ""
            said += [] if current else [word]
        else:
            said += [current, word] if current else [word]
    return said


def _checked_file(
    context: click.Context, option: click.Parameter, given: Path | None
) -> Path | None:
    if given is not None and given.suffix != ".json":
        raise click.BadParameter(f"{str(given)!r} does not end in .json")
    if given is not None and not given.parent.is_dir():  # told now, not when all is measured
        raise click.BadParameter(f"there is no folder {str(given.parent)!r}; make it")
    return given


@click.command(cls=_WithLists)
@click.option("--only", multiple=True, metavar="NAME ...", help="Models of the zoo by name.")
@click.option("--mine", metavar="MODULE:BUILD", help="Your own model: what build() returns.")
@click.option(
    "--ways",
    multiple=True,
    metavar="WAY ...",
    help="Of amp, liger, torchao, ours; or single rows by name.",
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
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="Start no further row after so long, and say which are left out.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="A row that says nothing for so long is ended.",
)
@click.option("--warm", is_flag=True, help="Compile with the caches on the disk, not without.")
@click.option("--logs", metavar="DIR", type=click.Path(path_type=Path), help="Keep logs here.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=_checked_file,
    help="Keep rows in FILE.json, and take up those that are there.",
)
@quiet_option
def models(**given: Any) -> None:
    """Train models that people know in every way there is.

    Of each: milliseconds of a step, the most memory, the seconds of the first step with its
    compilation, and the loss of the thirtieth step, against torch's mixed precision of the same
    mode; and whether that is what this library claims. Each row has a process of its own, and is
    timed while no other does anything. With --mine it is your own model.
    """
    from narrowcast.bench.zoo.running import Asked, measure_models
    from narrowcast.cli.view.models_table import print_models
    from narrowcast.cli.view.screen import screen

    progress = screen(quiet=given["quiet"], to_stderr=True)
    asked = Asked(
        only=given["only"],
        mine=given["mine"],
        ways=given["ways"],
        modes=given["modes"],
        quick=given["quick"],
        seconds=given["seconds"],
        together=given["together"],
        timeout_seconds=given["timeout"],
        cold=not given["warm"],
        kept=given["json_file"],
        logs=given["logs"],
    )
    zoo = measure_models(asked, tell=lambda line: progress.print(line, style="dim"))
    print_models(screen(quiet=given["quiet"]), zoo)
    if zoo.interrupted:
        raise Interrupted("the bench was interrupted; its table is of what was measured by then")
