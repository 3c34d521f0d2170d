import inspect
import math

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.precision.gradients.loss_scale import LossScale, RunningScale, power_of_two_below


def running(**settings):
    return RunningScale(LossScale(**settings), torch.device("cpu"))


def values(scale, history):
    seen = []
    for finite in history:
        scale.update(torch.tensor(finite))
        seen.append(float(scale.value))
    return seen


def test_the_defaults_are_those_of_the_design():
    scale = LossScale()
    assert (scale.init_scale, scale.growth_factor, scale.backoff_factor) == (65536, 2, 0.5)
    assert (scale.growth_interval, scale.min_scale, scale.max_scale) == (2000, 1, 262144)


def test_the_default_scale_moves_as_torchs_grad_scaler_does():
    scale = running(growth_interval=3, max_scale=2.0**40)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        finite = bool(torch.rand((), generator=generator) < 0.8)
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        theirs.scale((weight * (1.0 if finite else math.inf)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        scale.update(torch.tensor(finite))
        assert float(scale.value) == theirs.get_scale()


def test_the_arguments_of_grad_scaler_are_taken_by_name():
    names = inspect.signature(torch.amp.GradScaler).parameters.keys() - {"device", "enabled"}
    theirs = {n: inspect.signature(torch.amp.GradScaler).parameters[n].default for n in names}
    assert names == {"init_scale", "growth_factor", "backoff_factor", "growth_interval"}
    assert LossScale(**theirs) == LossScale()


def test_hysteresis_forgives_overflows_that_are_not_in_a_row():
    scale = running(hysteresis=2, init_scale=16.0)
    assert values(scale, [False, True, False, True, False, False, False]) == [
        16, 16, 16, 16, 16, 8, 4,
    ]  # fmt: skip


def test_a_static_scale_never_moves():
    assert set(
        values(running(dynamic=False, init_scale=64.0, growth_interval=1), [True, False] * 9)
    ) == {64.0}


def test_growth_starts_over_after_an_overflow():
    scale = running(growth_interval=3, init_scale=16.0)
    assert values(scale, [True, True, False, True, True, True]) == [16, 16, 8, 8, 8, 16]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, 1.0), (1.99, 1.0), (65535.9, 32768.0), (1e30, 2.0**99), (0.3, 0.25)],
)
def test_a_scale_is_rounded_down_to_a_power_of_two(value, expected):
    assert power_of_two_below(value) == expected
    assert LossScale(init_scale=value, min_scale=0.25, max_scale=1e30).init_scale == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"growth_factor": 3.0}, r"power of two above 1.*got 3\. Write growth_factor=2\."),
        ({"growth_factor": 1.5}, r"got 1\.5\. Write growth_factor=2\."),
        ({"growth_factor": 0.0}, r"Write growth_factor=2\."),
        ({"growth_factor": "2"}, "growth_factor must be a number, got '2'"),
        ({"init_scale": True}, "init_scale must be a number"),
        ({"backoff_factor": 0.3}, r"got 0\.3\. Write backoff_factor=0\.25\."),
        ({"growth_factor": 1.0}, r"Write growth_factor=2\."),
        ({"backoff_factor": 1.0}, r"Write backoff_factor=0\.5\."),
        ({"backoff_factor": -1.0}, r"Write backoff_factor=0\.5\."),
        ({"init_scale": 0.0}, "must be a positive number"),
        ({"init_scale": math.nan}, "must be a positive number"),
        ({"max_scale": math.inf}, "must be a positive number"),
        ({"init_scale": 2.0**20}, "must lie between"),
        ({"min_scale": 2.0**17}, "must lie between"),
        ({"growth_interval": 0}, "must be at least 1"),
        ({"hysteresis": 0}, "must be at least 1"),
        ({"min_scale": 1e-50}, "so that fp32 holds it and its inverse"),
        ({"max_scale": 1e300}, "so that fp32 holds it and its inverse"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        LossScale(**settings)


@pytest.mark.parametrize("bound", ["min_scale", "max_scale"])
def test_the_widest_bounds_allowed_can_be_multiplied_in_and_out_exactly(bound):
    extreme = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    scale = running(init_scale=extreme[bound], **extreme)
    x = torch.tensor([1.5, -3.0]) * (2.0**-20 if bound == "max_scale" else 2.0**20)
    assert torch.equal(x * scale.value * scale.value.reciprocal(), x)


def test_a_saved_scale_goes_on_where_it_stood():
    history = [True, True, False, True, True, True, False, False, True] * 3
    straight = running(growth_interval=4, hysteresis=2)
    values(straight, history[:11])
    resumed = running(growth_interval=4, hysteresis=2)
    resumed.load_state_dict(straight.state_dict())
    assert values(resumed, history[11:]) == values(straight, history[11:])
