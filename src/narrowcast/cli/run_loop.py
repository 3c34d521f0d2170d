"""A run shown while it goes on, from its next record to its report."""

from rich.console import Console

from narrowcast.cli.view.phases import is_scaled
from narrowcast.cli.view.progress import RunDisplay
from narrowcast.cli.view.summary import conclude
from narrowcast.errors import DivergedError
from narrowcast.runner.run import Run
from narrowcast.runs import StepRecord
from narrowcast.runs.tally import Tally
from narrowcast.training.checkpoints.export import WEIGHTS
from narrowcast.training.ending.early_stopping import EarlyStopping, run_end


def run_loop(run: Run, *, console: Console) -> None:
    """Show each record as it comes, then say where all of it is."""
    assert run.folder is not None
    task = run.task.info
    tally, stopping = Tally(steps=run.recipe.steps), EarlyStopping(run.recipe.eval, task)
    for record in run.earlier:
        tally = tally.after(record) if isinstance(record, StepRecord) else tally
        stopping.note(record)
    tally = tally.resumed()
    display = RunDisplay(console, tally, task=task, scaled=is_scaled(run.recipe, run.plan))
    try:
        with display:
            for number, record in enumerate(run.records(tell=display.warn)):
                for line in () if number else run.task.notices():
                    display.note(line)
                stopping.note(record)
                display.show(record)
    except DivergedError:
        _conclude(console, run, display, stopping, diverged=True)
        raise
    _conclude(console, run, display, stopping)


def _conclude(
    console: Console,
    run: Run,
    display: RunDisplay,
    stopping: EarlyStopping,
    *,
    diverged: bool = False,
) -> None:
    assert run.folder is not None
    conclude(
        console,
        run.folder.path,
        page=run.folder.path / "report.html",
        weights=run.folder.path / (run.task.weights_path or WEIGHTS),
        task=display.task,
        tally=display.tally,
        metrics=display.metrics,
        end=run_end(stopping, run.recipe, step=display.tally.step),
        diverged=diverged,
    )
