import pytest

from narrowcast.errors import ConfigError
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.task import EvalBatches, Hook


def test_only_declared_parts_of_the_loss_have_scales(ready):
    info = TaskInfo(metrics=(Metric(name="error"),), loss_parts=("a",))
    with pytest.raises(ConfigError, match=r"scaled_losses names b, and info\.loss_parts has a;"):
        ready().but(info=info, scaled_losses=("a", "b"))


def test_two_hooks_of_one_name_are_refused(ready):
    with pytest.raises(ConfigError, match="two hooks of one name: unit, unit"):
        ready().but(hooks=(Hook(name="unit"), Hook(name="unit")))


def test_a_state_is_saved_and_loaded_or_neither():
    with pytest.raises(ConfigError, match="give both, or none"):
        Hook(name="unit", state_dict=dict)


def test_held_out_data_has_a_part():
    with pytest.raises(ConfigError, match="write how many there are, 1 or more, or leave"):
        EvalBatches(parts=0, headline=lambda model, part: 0.0)
