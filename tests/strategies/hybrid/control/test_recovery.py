import json

import pytest

from narrowcast.strategies.hybrid.control.recovery import (
    Abort,
    Continue,
    ForceFullPhase,
    IncreaseConfidenceThreshold,
    Level,
    ReducePredictRatio,
    ResetPredictor,
    RollbackAndRetry,
    SkipBatch,
    recommended,
    told,
)


def test_levels_are_ordered():
    assert Level.NORMAL < Level.CAUTION < Level.WARNING < Level.CRITICAL


@pytest.mark.parametrize(
    ("level", "action"),
    [
        (Level.NORMAL, Continue()),
        (Level.CAUTION, ReducePredictRatio(0.5)),
        (Level.WARNING, ForceFullPhase(40)),
        (Level.CRITICAL, RollbackAndRetry(300)),
    ],
)
def test_each_level_asks_for_its_own_action(level, action):
    assert recommended(level, full_steps=20, checkpoint_step=300) == action


def test_without_a_checkpoint_there_is_nothing_to_return_to():
    assert isinstance(recommended(Level.CRITICAL, full_steps=20), Abort)


def test_only_a_rollback_and_an_abort_end_what_is_in_memory():
    actions = [
        Continue(),
        ReducePredictRatio(0.5),
        ForceFullPhase(3),
        IncreaseConfidenceThreshold(0.9),
        SkipBatch(),
        ResetPredictor(),
        RollbackAndRetry(5),
        Abort("why"),
    ]
    ending = [type(action).__name__ for action in actions if not action.can_continue]
    assert ending == ["RollbackAndRetry", "Abort"]


def test_an_action_is_told_as_plain_data():
    assert json.loads(json.dumps(told(RollbackAndRetry(5)))) == {
        "action": "RollbackAndRetry",
        "can_continue": False,
        "checkpoint_step": 5,
        "lr_factor": 0.5,
    }
