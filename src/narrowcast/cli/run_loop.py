"""A run from its next record to its report, whatever it ends with."""

import shlex
from collections.abc import Iterator

from rich.console import Console

from narrowcast.cli.view.phases import is_scaled
from narrowcast.cli.view.progress import RunDisplay
from narrowcast.cli.view.screen import working
from narrowcast.cli.view.summary import conclude
from narrowcast.config import LoadedRecipe
from narrowcast.errors import DivergedError, Interrupted
from narrowcast.precision.plan.plan import Plan
from narrowcast.report.run_data import task_info_of
from narrowcast.report.trackers import open_trackers
from narrowcast.runner.report_sections import write_run_report
from narrowcast.runs import Record, RunFolder, StepRecord
from narrowcast.runs.tally import Tally


def run_loop(
    run: RunFolder,
    records: Iterator[Record],
    *,
    console: Console,
    loaded: LoadedRecipe,
    plan: Plan,
) -> None:
    """Write and show each record as it comes, then write the report and say where all of it is.

    A run that ends early gets its report too: that is where one looks for the reason.
    """
    recipe, earlier = loaded.recipe, run.records()
    tally = Tally(steps=recipe.steps)
    for record in earlier:
        tally = tally.after(record) if isinstance(record, StepRecord) else tally
    task = task_info_of(run.path)
    display = RunDisplay(console, tally, task=task, scaled=is_scaled(loaded.recipe, plan))
    trackers = open_trackers(
        recipe.trackers,
        folder=run.path,
        earlier=earlier,
        recipe_text=loaded.text,
        settings={key: entry["value"] for key, entry in loaded.resolved().items()},
        tell=display.warn,
    )
    try:
        with display, trackers:
            for record in records:
                run.write(record)
                display.show(record)
                trackers.take(record)
    except Interrupted as stop:
        write_run_report(run.path)
        raise Interrupted(
            f"interrupted after step {display.tally.step} of {recipe.steps}\n"
            f"resume with: narrowcast resume {shlex.quote(str(run.path))}"
        ) from stop
    except DivergedError as error:
        raise DivergedError(f"{error}\nwhat led to it: {write_run_report(run.path)}") from error
    with working(console, "writing the report"):
        page = write_run_report(run.path)
    conclude(
        console,
        run.path,
        page=page,
        task=task,
        tally=display.tally,
        metrics=display.metrics,
    )
