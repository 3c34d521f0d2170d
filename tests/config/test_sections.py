import pickle

import pytest
from pydantic import ValidationError

from narrowcast.config import Recipe
from narrowcast.config.common_sections import (
    LossScaleSection,
    LrScheduleSection,
    OptimizerSection,
)
from narrowcast.config.sections import CommonSettings, DataSection, Section, Sections
from narrowcast.config.tree import build_tree, leaves
from narrowcast.errors import ConfigError


def test_the_defaults_of_adamw_are_those_of_torch():
    torch = pytest.importorskip("torch", reason="compares with torch's own defaults")
    ours = OptimizerSection()
    theirs = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert {key: theirs[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": ours.lr,
        "betas": ours.betas,
        "eps": ours.eps,
        "weight_decay": ours.weight_decay,
    }


def test_every_setting_has_a_description_of_one_line():
    described = {
        path: field.description or "" for path, field in leaves(build_tree(CommonSettings))
    }
    assert len(described) > 35
    assert [path for path, text in described.items() if not text or "\n" in text] == []


def test_a_scale_beyond_the_usual_is_accepted_when_its_ceiling_is_raised_too():
    scale = LossScaleSection(init_scale=1e30, max_scale=1e30)
    assert (scale.init_scale, scale.max_scale) == (1e30, 1e30)


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_factor": 1.0},
        {"growth_factor": 1.5},
        {"backoff_factor": 0.3},
        {"growth_factor": 0.5},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": -0.5},
        {"min_scale": 0.0},
        {"min_scale": 2.0**-25},
        {"max_scale": 2.0**128},
        {"init_scale": float("nan")},
        {"init_scale": -1.0},
        {"max_scale": float("inf")},
        {"hysteresis": 0},
        {"max_skipped_steps": 0},
        {"growth_interval": 0},
        {"min_scale": 8.0, "max_scale": 4.0, "init_scale": 4.0},
        {"init_scale": 262145.0},
        {"init_scale": 0.5},
    ],
)
def test_a_loss_scale_that_could_vanish_or_run_away_is_refused(settings):
    with pytest.raises(ValidationError, match="LossScaleSection"):
        LossScaleSection(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "betas": (0.9, 0.95)},
        {"name": "adamw", "momentum": 0.9},
        {"name": "adafactor", "eps": 1e-6},
        {"name": "rmsprop", "fused": True},
    ],
)
def test_a_setting_the_optimizer_would_ignore_is_refused(settings):
    with pytest.raises(ValidationError, match=r"Leave .* out, or choose"):
        OptimizerSection(**settings)


def test_an_unfused_optimizer_may_be_asked_to_stay_so():
    assert OptimizerSection(name="rmsprop", fused=False).fused is False


def test_an_end_value_for_a_constant_schedule_is_refused():
    with pytest.raises(ValidationError, match="no effect in a constant schedule"):
        LrScheduleSection(name="constant", min_lr_ratio=0.1)


def test_settings_cannot_be_changed_afterwards():
    scale = LossScaleSection()
    with pytest.raises(ValidationError, match="frozen"):
        scale.init_scale = 2.0  # type: ignore[misc]


class Words(DataSection):
    length: int = 8


class Net(Section):
    width: int = 16


def test_a_recipe_made_in_python_keeps_its_workloads_sections_and_survives_pickling():
    recipe = Recipe(workload="toy", steps=2, batch_size=1, data=Words(length=9), model=Net())
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe.model_dump()["data"] == {"workers": 0, "prefetch": 2, "length": 9}
    assert recipe.model_dump()["model"] == {"width": 16}


@pytest.mark.parametrize("name", ["steps", "optimizer", "precision", "further"])
def test_a_section_that_every_recipe_has_cannot_be_a_workload_s_own(name):
    with pytest.raises(ConfigError, match=f"cannot be called {name}, which every recipe has"):
        Sections(data=DataSection, model=Section, **{name: Section})


def test_a_section_is_called_as_a_key_is_written():
    with pytest.raises(ConfigError, match="Write small letters"):
        Sections(data=DataSection, model=Section, Ica=Section)


def test_a_section_is_found_by_its_class():
    class Mask(Section):
        pass

    mask = Mask()
    values = {"workload": "toy", "steps": 1, "batch_size": 1, "data": DataSection()}
    recipe = Recipe(**values, model=Section(), further={"mask": mask})
    assert recipe.section(Mask) is mask
    assert recipe.section(DataSection) is recipe.data
    with pytest.raises(ConfigError, match="workload toy has no OptimizerSection"):
        recipe.section(OptimizerSection)
