"""Whether a run is running: judged from its records, its lock and the time since it last wrote."""

from dataclasses import dataclass
from pathlib import Path

from narrowcast.report.phrases import at_scale, count, duration
from narrowcast.report.summary import RunEnding
from narrowcast.runs.commands import resume_command

QUIET_SECONDS = 5.0
"""Seconds after the last record: a disk may not share the locks of another machine."""
STARTING_SECONDS = 1800.0
"""A first step may compile for minutes; after this the page shows a warning."""
SILENT_SECONDS = 120.0
"""An evaluation or a checkpoint that takes longer is worth a remark."""
SILENT_STEPS = 20
"""The same, for a run whose steps are long."""


@dataclass(frozen=True, kw_only=True)
class LiveProgress:
    """What the records say of a run's course, in a few numbers."""

    step: int = 0
    requested_steps: int = 0
    saved_at: int | None = None
    """The step of the last checkpoint."""
    skipped_in_a_row: int = 0
    """At the end of the records, all at one loss scale."""
    loss_scale: float = 1.0
    max_skipped_steps: int | None = None
    why: str = ""
    lost_since: int | None = None
    """The step from which on no loss was finite."""
    step_seconds: float = 0.0
    diverged: str = ""
    """What is wrong with the run, should it have done its steps."""
    ended_early: str = ""
    """Why it ends where it is, before all of its steps."""

    @property
    def is_done(self) -> bool:
        return self.step >= self.requested_steps or bool(self.ended_early)


def status(
    course: LiveProgress, *, folder: Path, held: bool | None, quiet: float, missing: bool
) -> tuple[RunEnding, bool]:
    """Return where a run stands and whether it runs; `held` is its lock, None if unknown."""
    if missing:
        advice = f"The folder `{folder}` no longer exists. The page shows what was read before."
        return RunEnding("Folder removed", "bad", advice=advice), False
    at_work = _at_work(course, held=held, quiet=quiet)
    if not at_work:
        silent = f"nothing was written for {duration(quiet // 60 * 60)}"
        sign = "no process is running it any more" if held is False else silent
        return _ended(course, folder, sign=sign), False
    if course.step == 0:
        return RunEnding("Starting", "fair", advice="No step has been recorded yet."), True
    remark = _remark(course, quiet=quiet)
    if course.lost_since is not None:
        advice = f"The loss has not been a finite number since step {count(course.lost_since)}."
        return RunEnding("Loss not finite", "bad", advice=f"{advice} {remark}".strip()), True
    label = "Finishing" if course.requested_steps > 0 and course.is_done else "Running"
    return RunEnding(label, "fair" if remark else "good", advice=remark), True


def _at_work(course: LiveProgress, *, held: bool | None, quiet: float) -> bool:
    if held:
        return True
    if course.step == 0:
        # A run takes its lock with its first record.
        return quiet < STARTING_SECONDS
    if course.requested_steps > 0 and course.is_done and course.step == course.saved_at:
        return False
    if held is None:
        return quiet < _silence(course)
    return quiet < max(QUIET_SECONDS, 3 * course.step_seconds)


def _ended(course: LiveProgress, folder: Path, *, sign: str) -> RunEnding:
    resume = f"`{resume_command(folder)}`"
    if course.step == 0:
        return RunEnding(
            "Seems dead",
            "bad",
            advice=(
                "The run was set up but has not recorded a step since. Check the terminal it "
                "was started in."
            ),
        )
    progress = f"{count(course.step)} of {count(course.requested_steps, 'step')}"
    gave_up = course.max_skipped_steps is not None and course.skipped_in_a_row >= max(
        1, course.max_skipped_steps
    )
    if gave_up and course.step < course.requested_steps:
        reason = f" Last reason: {course.why}." if course.why else ""
        return RunEnding(
            "Diverged",
            "bad",
            advice=(
                f"The last {count(course.skipped_in_a_row, 'step')} were all "
                f"skipped{at_scale(course.loss_scale)}, so the run stopped after "
                f"{progress}.{reason}"
            ),
        )
    if course.diverged and course.is_done:
        return RunEnding(
            "Diverged", "bad", advice=f"The run finished its steps but diverged: {course.diverged}."
        )
    if course.saved_at == course.step:
        if course.is_done:
            early = f"The run stopped early after {progress}: {course.ended_early}."
            return RunEnding("Finished", "good", advice=early if course.ended_early else "")
        return RunEnding(
            "Interrupted",
            "fair",
            advice=(
                f"The run stopped after {progress}, with a checkpoint at the last step. {resume} "
                "continues it from there."
            ),
        )
    where = (
        f"There is no checkpoint yet, so {resume} starts again."
        if course.saved_at is None
        else f"{resume} continues it from the checkpoint at step {count(course.saved_at)}."
    )
    return RunEnding(
        "Seems dead", "bad", advice=f"The records end after {progress}, and {sign}. {where}"
    )


def _remark(course: LiveProgress, *, quiet: float) -> str:
    if quiet < _silence(course):
        return ""
    # Whole minutes, so that the page is not updated every second.
    return (
        f"Nothing was recorded for {duration(quiet // 60 * 60)}, but the process is still running."
    )


def _silence(course: LiveProgress) -> float:
    return max(SILENT_SECONDS, SILENT_STEPS * course.step_seconds)
