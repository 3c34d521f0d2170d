import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

from narrowcast.runs import CheckpointRecord, EvalRecord, StepRecord, to_line
from narrowcast.runs.follow import LOOK_BYTES, Follower


def step(number, seconds=0.1):
    return StepRecord(
        step=number,
        loss=2.0,
        loss_scale=1.0,
        applied=True,
        skip_reason="",
        grad_norm=1.0,
        lr=1e-3,
        lost_updates=None,
        items=8,
        seconds=seconds,
        peak_bytes=1,
    )


def text(*records):
    return "".join(to_line(record) + "\n" for record in records).encode()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


@given(cuts=lists(integers(0, 900), max_size=6))
def test_however_the_lines_arrive_each_record_is_seen_once(tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("run") / "records.jsonl"
    records = [step(1), EvalRecord(step=1, metrics={"loss": 2.0}), step(2), step(3)]
    content = text(*records)
    follower, seen = Follower(path), []
    for end in [*sorted(cuts), len(content)]:
        path.write_bytes(content[:end])
        news = follower.look()
        assert (news.afresh, news.damaged) == (False, 0)
        seen += news.records
    assert seen == records


def test_a_file_cut_back_to_a_checkpoint_is_read_from_its_beginning(path):
    follower = Follower(path)
    path.write_bytes(text(step(1), step(2), step(3)))
    follower.look()
    path.write_bytes(text(step(1)))
    news = follower.look()
    assert news.afresh
    assert news.records == (step(1),)


def test_a_file_cut_back_and_grown_longer_between_two_looks_is_noticed(path):
    follower = Follower(path)
    path.write_bytes(text(step(1), step(2), step(3)))
    follower.look()
    again = [step(1), *(step(n, seconds=0.2) for n in (2, 3, 4))]
    path.write_bytes(text(*again))
    news = follower.look()
    assert news.afresh
    assert news.records == tuple(again)


def test_a_new_file_of_the_same_name_is_read_from_its_beginning(path, tmp_path):
    follower = Follower(path)
    path.write_bytes(text(step(1)))
    follower.look()
    (tmp_path / "other").write_bytes(text(step(1), step(2)))
    (tmp_path / "other").rename(path)
    assert follower.look().records == (step(1), step(2))


def test_a_file_that_comes_back_unchanged_is_not_told_again(path, tmp_path):
    follower = Follower(path)
    path.write_bytes(text(step(1)))
    follower.look()
    path.rename(tmp_path / "away")
    assert follower.look().missing
    (tmp_path / "away").rename(path)
    news = follower.look()
    assert (news.missing, news.afresh, news.records) == (False, False, ())


def test_a_damaged_line_is_counted_and_the_next_one_read(path):
    path.write_bytes(text(step(1)) + b'{"kind": "step"}\n\xff\n' + text(step(2)))
    news = Follower(path).look()
    assert news.records == (step(1), step(2))
    assert news.damaged == 2


@pytest.mark.parametrize("field", ["step", "items", "peak_bytes"])
def test_a_number_that_no_run_can_have_is_damage(path, field):
    path.write_bytes(text(replace(step(1), **{field: 10**400}), step(2)))
    news = Follower(path).look()
    assert (news.records, news.damaged) == ((step(2),), 1)


def test_kinds_nobody_asked_for_are_passed_over(path):
    saved = CheckpointRecord(step=1, seconds_blocked=0.0, seconds_total=0.0, bytes=1)
    path.write_bytes(text(step(1), saved) + b'{"kind": "from a later version"}\n')
    news = Follower(path, kinds=["checkpoint"]).look()
    assert (news.records, news.damaged) == ((saved,), 0)


def test_a_file_larger_than_a_look_is_read_in_several(path):
    line = text(step(1))
    path.write_bytes(line * (LOOK_BYTES // len(line) + 10))
    follower, looks = Follower(path), []
    looks.append(follower.look())
    while looks[-1].more:
        looks.append(follower.look())
    assert len(looks) == 2
    assert sum(len(news.records) for news in looks) == LOOK_BYTES // len(line) + 10


def test_a_line_without_an_end_does_not_stop_what_follows_it(path):
    path.write_bytes(b"x" * (2 * LOOK_BYTES + 5) + b"\n" + text(step(1)))
    follower, records, damaged = Follower(path), [], 0
    for _ in range(4):
        news = follower.look()
        records += news.records
        damaged += news.damaged
    assert records == [step(1)]
    assert damaged > 0


def test_a_link_to_a_file_elsewhere_is_not_followed(path, tmp_path):
    (tmp_path / "elsewhere").write_bytes(text(step(1)))
    path.symlink_to(tmp_path / "elsewhere")
    assert Follower(path).look().missing


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_place_of_the_file_does_not_make_the_reader_wait(path):
    os.mkfifo(path)
    assert Follower(path).look().missing
