from pathlib import Path

import pytest

from narrowcast.report.live.status import LiveProgress, status

HALF_WAY = LiveProgress(step=50, requested_steps=100, step_seconds=0.1)


def judged(course, **changes):
    known = {"held": True, "quiet": 0.1, "missing": False} | changes
    ending, at_work = status(course, folder=Path("runs/my run"), **known)
    return ending.label, at_work


@pytest.mark.parametrize(
    ("course", "known", "label"),
    [
        (LiveProgress(requested_steps=100), {}, "Starting"),
        (LiveProgress(requested_steps=100), {"held": False}, "Starting"),
        (HALF_WAY, {}, "Running"),
        (HALF_WAY, {"quiet": 1e6}, "Running"),
        # On a disk whose locks are not shared, what it writes shows that it runs.
        (HALF_WAY, {"held": False, "quiet": 1.0}, "Running"),
        (HALF_WAY, {"held": None, "quiet": 60.0}, "Running"),
        (LiveProgress(step=100, requested_steps=100), {}, "Finishing"),
        (LiveProgress(step=50, requested_steps=100, ended_early="no better"), {}, "Finishing"),
        (LiveProgress(step=50, requested_steps=100, lost_since=40), {}, "Loss not finite"),
    ],
)
def test_a_run_at_work_is_said_to_be(course, known, label):
    assert judged(course, **known) == (label, True)


@pytest.mark.parametrize(
    ("course", "label"),
    [
        (LiveProgress(requested_steps=100), "Seems dead"),
        (HALF_WAY, "Seems dead"),
        (LiveProgress(step=50, requested_steps=100, saved_at=40), "Seems dead"),
        (LiveProgress(step=50, requested_steps=100, saved_at=50), "Interrupted"),
        (LiveProgress(step=100, requested_steps=100, saved_at=100), "Finished"),
        (LiveProgress(step=100, requested_steps=100, saved_at=90), "Seems dead"),
        (
            LiveProgress(step=100, requested_steps=100, saved_at=100, diverged="the loss is nan"),
            "Diverged",
        ),
        (
            LiveProgress(step=50, requested_steps=100, saved_at=50, diverged="no step was applied"),
            "Interrupted",
        ),
        (
            LiveProgress(step=50, requested_steps=100, skipped_in_a_row=20, max_skipped_steps=20),
            "Diverged",
        ),
        (
            LiveProgress(step=50, requested_steps=100, saved_at=50, ended_early="no better"),
            "Finished",
        ),
        (
            LiveProgress(step=50, requested_steps=100, saved_at=40, ended_early="no better"),
            "Seems dead",
        ),
        (
            LiveProgress(
                step=50, requested_steps=100, saved_at=50, ended_early="it", diverged="nan"
            ),
            "Diverged",
        ),
    ],
)
@pytest.mark.parametrize("held", [False, None])
def test_a_run_that_ended_is_told_by_how(course, label, held):
    assert judged(course, held=held, quiet=1e6) == (label, False)


def test_a_finished_run_is_finished_at_once_where_locks_do_not_tell():
    assert judged(LiveProgress(step=9, requested_steps=9, saved_at=9), held=None) == (
        "Finished",
        False,
    )


def test_a_folder_that_is_gone_is_said_to_be():
    assert judged(HALF_WAY, missing=True) == ("Folder removed", False)


def test_what_to_type_next_is_a_command_a_shell_takes():
    ending, _ = status(HALF_WAY, folder=Path("runs/my run"), held=False, quiet=99, missing=False)
    assert "`narrowcast resume 'runs/my run'`" in ending.advice


def test_a_live_process_that_records_nothing_is_remarked_on():
    ending, _ = status(HALF_WAY, folder=Path("r"), held=True, quiet=310.0, missing=False)
    assert "Nothing was recorded for 5 min" in ending.advice
