"""What a strategy does is strategy_line in a line, with what it was judged by."""

from narrowcast.cli.view.progress import strategy_line
from narrowcast.runs import StrategyRecord
from narrowcast.runs.task_info import TaskInfo


def readout(**values):
    return StrategyRecord(
        step=20, phase="full", event="readout", what="trained",
        why="best loss of 2 candidates on 3 of 40 held-out batches", values=values, seconds=0.1,
    )  # fmt: skip


def test_a_read_out_says_on_how_many_batches_it_was_chosen():
    line = strategy_line(readout(trained=1.5, average=1.6), TaskInfo())
    assert line.startswith(
        "step 20 returned weights: trained (trained 1.500, average 1.600): best loss"
    )
    assert line.endswith("on 3 of 40 held-out batches")


def test_where_there_was_nothing_to_choose_nothing_is_told():
    assert strategy_line(readout(trained=1.5), TaskInfo()) == ""


def jump(what, **values):
    return StrategyRecord(
        step=62, phase="predict", event="jump", what=what, why="the loss rose by 0.1",
        values=values, seconds=0.1,
    )  # fmt: skip


def test_a_jump_is_shown_with_its_result():
    line = strategy_line(jump("line, 1 step: rejected", horizon=1.0), TaskInfo())
    assert line == "step 62: prediction of line, 1 step: rejected: the loss rose by 0.1"
