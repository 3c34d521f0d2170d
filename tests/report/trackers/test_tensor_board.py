"""Event files, read back with TensorBoard's own reader."""

import math

import pytest

from narrowcast.report.trackers import TensorBoard
from narrowcast.runs import CheckpointRecord, EvalRecord, FindingRecord

pytest.importorskip("tensorboard", reason="needs the package tensorboard")


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    found.Reload()
    return found


def course(found, tag):
    return [(event.step, event.value) for event in found.Scalars(tag)]


def texts(found, tag):
    events = found.Tensors(f"{tag}/text_summary")
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events]


@pytest.fixture
def track(tmp_path):
    """Tell TensorBoard some records of a run that goes on from others."""

    def tell(records, *, earlier=(), close=True):
        tracker = TensorBoard(tmp_path, earlier=list(earlier), recipe_text="steps: 3\nseed: 1")
        for record in records:
            tracker.take(record)
        if close:
            tracker.close()
        return tracker

    return tell


def test_numbers_and_words_are_read_back_at_their_steps(track, tmp_path, step):
    finding = FindingRecord(
        step=2, since=1, module="<b>", role="", what="w", why="y", action="a", advice=""
    )
    track([step(1, loss=2.5), step(2, loss=math.inf, applied=False, skip_reason="inf"), finding])
    found = read(tmp_path)
    assert course(found, "train/loss") == [(1, 2.5), (2, math.inf)]
    assert course(found, "train/skipped") == [(1, 0.0), (2, 1.0)]
    assert texts(found, "skipped") == [(2, "inf")]
    assert texts(found, "finding") == [(2, "<b>: w: y; a")]
    assert texts(found, "recipe") == [(0, "    steps: 3\n    seed: 1\n")]


def test_a_run_that_is_continued_has_each_step_once(track, tmp_path, step):
    kept = [step(n, loss=float(n)) for n in (1, 2)]
    evaluated = EvalRecord(step=2, metrics={"loss": 9.0})
    track([*kept, evaluated, step(3, loss=-3.0), step(4, loss=-4.0)])
    track([step(3, loss=3.0)], earlier=[*kept, evaluated])
    found = read(tmp_path)
    assert course(found, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert course(found, "eval/loss") == [(2, 9.0)]


def test_files_of_a_run_continued_at_once_sort_in_the_order_they_were_written(
    track, tmp_path, step
):
    for _ in range(3):
        track([step(1)])
    names = [path.name for path in sorted((tmp_path / "tensorboard").iterdir())]
    seconds = [int(name.split(".")[3]) for name in names]
    assert len(set(seconds)) == 3


def test_a_run_that_begins_again_has_each_step_once(track, tmp_path, step):
    track([step(1, loss=-1.0), step(2, loss=-2.0)])
    track([step(1, loss=1.0)])
    assert course(read(tmp_path), "train/loss") == [(1, 1.0)]


def test_a_tracker_that_comes_later_is_told_what_it_missed(track, tmp_path, step):
    track([step(3)], earlier=[step(1), step(2)])
    assert [n for n, _ in course(read(tmp_path), "train/loss")] == [1, 2, 3]


def test_what_led_to_a_checkpoint_is_on_disk_when_it_is(track, tmp_path, step):
    saved = CheckpointRecord(step=2, seconds_blocked=0.0, seconds_total=0.0, bytes=1)
    tracker = track([step(1), step(2), saved], close=False)
    assert [n for n, _ in course(read(tmp_path), "train/loss")] == [1, 2]
    tracker.close()
