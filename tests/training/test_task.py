import pytest

from narrowcast.errors import ConfigError
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.task import EvalBatches, Hook


def test_only_declared_parts_of_the_loss_have_scales(ready):
    info = TaskInfo(metrics=(Metric(name="error"),), loss_parts=("a",))
    with pytest.raises(ConfigError, match=r"info\.loss_parts \(a\), got b"):
        ready().but(info=info, scaled_losses=("a", "b"))


def test_two_hooks_of_one_name_are_refused(ready):
    with pytest.raises(ConfigError, match="its own name, got unit, unit"):
        ready().but(hooks=(Hook(name="unit"), Hook(name="unit")))


def test_a_state_is_saved_and_loaded_or_neither():
    with pytest.raises(ConfigError, match="both state_dict and load_state_dict or neither"):
        Hook(name="unit", state_dict=dict)


def test_held_out_data_has_a_part():
    with pytest.raises(ConfigError, match="must be 1 or more"):
        EvalBatches(parts=0, headline=lambda model, part: 0.0)
