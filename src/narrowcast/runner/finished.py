"""Whether a run is finished: all steps are done and all output is intact."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.config import Recipe
from narrowcast.errors import CheckpointError
from narrowcast.plain_files import read_plain
from narrowcast.report.page import FILE as REPORT
from narrowcast.runner.changes import PLAN, continued
from narrowcast.runner.report_sections import write_run_report
from narrowcast.runs import RunFolder, TaskInfo
from narrowcast.runs.folder import ENVIRONMENT, RECIPE, RESOLVED, TASK
from narrowcast.runs.writing import explain_write_error
from narrowcast.training.checkpoints.checkpoint import PREPARED, checkpoint_step, latest
from narrowcast.training.checkpoints.export import RESULTS, WEIGHTS, RunEnd, results_are_whole
from narrowcast.training.checkpoints.resume import blamed_on_part, latest_state, require_records
from narrowcast.training.checkpoints.run_checkpoint import StoredShards
from narrowcast.training.ending import EarlyStopping, run_end

REPORT_DUE = ".report-due"
"""Present from the start of a run until its report is written; if the run is killed, it stays."""


def finished(folder: str | Path, overrides: Sequence[str] = ()) -> RunEnd | None:
    """Return where the run in `folder` ended if nothing is left to do, else None."""
    with RunFolder.open(folder) as run:
        last = latest(run.checkpoints)
        if last is None or not _has_final_report(run.path):
            return None
        state = latest_state(run)
        if state is not None and isinstance(shards := state.get(PREPARED), StoredShards):
            shards.verify()
        recipe = continued(run, overrides, state=state).after.recipe
        require_records(run, state)
        end = _run_end(state or {}, recipe, run.task_info(), step=checkpoint_step(last))
        # The number of steps of other epochs is not known yet.
        over = recipe.is_settled and (end.step == end.requested_steps or bool(end.why))
        whole = over and results_are_whole(run.path, step=end.step, exported=end.exported)
        return end if whole else None


def _run_end(state: Mapping[str, Any], recipe: Recipe, info: TaskInfo, *, step: int) -> RunEnd:
    stopping = EarlyStopping(recipe.eval, info)
    if "improvement" in state:  # restoring an older checkpoint raises
        with blamed_on_part(step, "evaluation history"):
            stopping.load_state_dict(state["improvement"])
    return run_end(stopping, recipe, step=step)


def require_places(folder: Path) -> None:
    """Raise if a folder is in the place of a file that the run writes."""
    for name in (RECIPE, RESOLVED, ENVIRONMENT, TASK, PLAN, WEIGHTS, RESULTS, REPORT, REPORT_DUE):
        if (folder / name).is_dir():
            raise CheckpointError(
                f"{folder / name} must be a file, got a folder. Move it elsewhere."
            )


def report_is_due(folder: Path) -> None:
    """Mark the report of the run in `folder` as out of date."""
    try:
        (folder / REPORT_DUE).touch()
    except OSError as error:
        raise CheckpointError(f"Cannot write to {folder}: {explain_write_error(error)}.") from error


def write_due_report(folder: Path) -> Path:
    """Write the report of a run that has ended or stopped."""
    page = write_run_report(folder)
    try:
        (folder / REPORT_DUE).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"Cannot write to {folder}: {explain_write_error(error)}.") from error
    return page


def _has_final_report(folder: Path) -> bool:
    """Return whether the report is complete and of the run's end."""
    try:
        page = read_plain(folder / REPORT).strip().lower()
    except OSError:
        return False
    whole = page.startswith(b"<!doctype html") and page.endswith(b"</html>")
    return whole and not (folder / REPORT_DUE).exists()
