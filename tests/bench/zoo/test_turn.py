import pytest

from narrowcast.bench.zoo.turn import Turn
from narrowcast.bench.zoo.ways import AMP, Trial

TRIAL = Trial(model="lstm", way=AMP, mode="eager")
JOB = {
    "bench": "models", "trial": vars(TRIAL), "device": "cpu", "quick": True, "together": 2,
    "started": 0.0,
}  # fmt: skip


@pytest.fixture
def turn(tmp_path):
    one = Turn(TRIAL, JOB, folder=tmp_path, timeout_seconds=600, cold=False)
    yield one
    one.end()


def test_time_in_which_others_were_waited_for_counts(turn):
    turn._worker.asked -= 601
    turn.await_import()
    assert turn.why == "no answer for 600 s, so it was ended"


def test_one_that_is_over_can_be_asked_and_says_nothing(turn):
    turn._worker.kill()
    turn.await_import()
    assert turn.why == "died of SIGKILL"
    turn.ask("set up")
    assert turn.answer() is None
    assert turn.log() == []
