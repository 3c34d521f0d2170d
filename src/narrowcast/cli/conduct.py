"""A run from its next record to its report, whatever it ends with."""

import shlex
from collections.abc import Iterator

from rich.console import Console

from narrowcast.cli.progress import RunDisplay
from narrowcast.cli.screen import working
from narrowcast.cli.summary import conclude
from narrowcast.config import Recipe
from narrowcast.errors import DivergedError
from narrowcast.precision.plan import Plan
from narrowcast.report import write_report
from narrowcast.runs import Record, RunFolder, StepRecord
from narrowcast.runs.tally import Tally
from narrowcast.training.trainer import Interrupted


def conduct(
    run: RunFolder, records: Iterator[Record], *, console: Console, recipe: Recipe, choices: Plan
) -> None:
    """Write and show each record as it comes, then write the report and say where all of it is.

    A run that ends early gets its report too: that is where one looks for the reason.
    """
    tally = Tally(steps=recipe.steps)
    for earlier in run.records():
        tally = tally.after(earlier) if isinstance(earlier, StepRecord) else tally
    display = RunDisplay(console, tally, scaled=choices.policy.needs_loss_scale)
    try:
        with display:
            for record in records:
                run.write(record)
                display.show(record)
    except Interrupted as stop:
        write_report(run.path)
        raise Interrupted(
            f"interrupted after step {display.tally.step} of {recipe.steps}\n"
            f"resume with: narrowcast resume {shlex.quote(str(run.path))}"
        ) from stop
    except DivergedError as error:
        raise DivergedError(f"{error}\nwhat led to it: {write_report(run.path)}") from error
    with working(console, "writing the report"):
        page = write_report(run.path)
    conclude(console, run.path, page=page, tally=display.tally, metrics=display.metrics)
