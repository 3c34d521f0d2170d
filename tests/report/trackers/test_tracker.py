from dataclasses import dataclass, field

import pytest

from narrowcast.report.trackers import Trackers, numbers, record_text
from narrowcast.runs import CheckpointRecord, EvalRecord, FindingRecord, PrecisionRecord

SAVED = CheckpointRecord(step=1, seconds_blocked=0.0, seconds_total=0.0, bytes=1)


@dataclass
class Fragile:
    """Somebody else's program, which breaks when it is told to."""

    at: str = ""
    seen: list = field(default_factory=list)

    def take(self, record):
        if self.at == "take" and self.seen:
            raise RuntimeError("the disk\nis full")
        self.seen.append(record.step)

    def close(self):
        if self.at == "close":
            raise OSError
        self.seen.append("closed")


def broken():
    raise ValueError("no such server")


def test_a_tracker_that_fails_says_so_once_and_the_others_go_on(step):
    told, fragile, sound = [], Fragile("take"), Fragile()
    trackers = Trackers({"one": lambda: fragile, "two": lambda: sound}, tell=told.append)
    for n in (1, 2, 3):
        trackers.take(step(n))
    trackers.close()
    assert fragile.seen == [1]
    assert sound.seen == [1, 2, 3, "closed"]
    assert len(told) == 1
    assert told[0].startswith("one failed and was disabled (RuntimeError: the disk is full)")


def test_a_tracker_that_cannot_be_opened_is_left_out(step):
    told, sound = [], Fragile()
    trackers = Trackers({"one": broken, "two": lambda: sound}, tell=told.append)
    trackers.take(step(1))
    trackers.close()
    assert sound.seen == [1, "closed"]
    assert ["no such server" in text for text in told] == [True]


def test_a_tracker_that_cannot_be_closed_does_not_keep_the_others_open():
    told, sound = [], Fragile()
    Trackers({"one": lambda: Fragile("close"), "two": lambda: sound}, tell=told.append).close()
    assert sound.seen == ["closed"]
    assert len(told) == 1


def test_an_interruption_is_no_failure_of_a_tracker(step):
    class Interrupted:
        def take(self, record):
            raise KeyboardInterrupt

    trackers = Trackers({"one": Interrupted}, tell=pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        trackers.take(step(1))


def test_what_a_record_holds_is_told_as_numbers_and_words(step):
    record = step(1, applied=False, skip_reason="inf", items=10, seconds=0.5, lost_updates=0.25)
    assert numbers(record)["speed/items_per_second"] == 20
    assert numbers(record)["train/skipped"] == 1
    assert numbers(record)["train/lost_updates"] == 0.25
    assert record_text(record) == {"skipped": "inf"}
    assert "train/lost_updates" not in numbers(step(1))
    assert record_text(step(1)) == {}
    assert numbers(EvalRecord(step=1, metrics={"loss": 2.0})) == {"eval/loss": 2.0}
    texts = {"what": "saturates", "why": "amax 500", "action": "none", "advice": "wait"}
    finding = FindingRecord(step=1, since=1, module="head", role="input", **texts)
    assert record_text(finding) == {"finding": "head input: saturates: amax 500; none; wait"}
    change = PrecisionRecord(step=1, module="", before="e4m3", after="bf16", reason="phase")
    assert record_text(change) == {"precision": "e4m3 → bf16: phase"}
    assert (numbers(SAVED), record_text(SAVED)) == ({}, {})


def test_parts_of_the_loss_are_numbers_of_their_own(step):
    found = numbers(step(1, loss_parts={"prior": 0.5, "noise": 0.25}))
    assert {name: y for name, y in found.items() if name.startswith("loss/")} == {
        "loss/prior": 0.5,
        "loss/noise": 0.25,
    }
