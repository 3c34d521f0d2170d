from itertools import islice

import pytest
import torch

from narrowcast.errors import ConfigError, DivergedError
from narrowcast.runs import StepRecord
from narrowcast.training.train_loop import train_loop


def steps_of(made):
    records = train_loop(made.prepared, made.task, made.recipe)
    return [r for r in records if isinstance(r, StepRecord)]


def test_the_settings_of_the_loss_scale_arrive(ready):
    scale = {"init_scale": 16.0, "growth_factor": 4.0, "growth_interval": 2, "max_scale": 1024.0}
    made = ready("fp16", steps=9, precision={"policy": "fp16", "loss_scale": scale})
    assert [r.loss_scale for r in steps_of(made)] == [16, 16, 64, 64, 256, 256, 1024, 1024, 1024]


def test_a_scale_that_is_not_dynamic_stays(ready):
    scale = {"init_scale": 16.0, "growth_interval": 1, "dynamic": False}
    made = ready("fp16", steps=5, precision={"policy": "fp16", "loss_scale": scale})
    assert {r.loss_scale for r in steps_of(made)} == {16.0}


def test_a_policy_without_fp16_has_no_scale(ready):
    assert {r.loss_scale for r in steps_of(ready("bf16", steps=3))} == {1.0}


@pytest.mark.parametrize(
    ("scale", "scales"),
    [
        ({"backoff_factor": 0.25, "min_scale": 4.0}, [65536.0, 16384.0, 4096.0]),
        ({"hysteresis": 2, "min_scale": 4.0}, [65536.0, 65536.0, 32768.0]),
    ],
)
def test_overflows_move_the_scale_as_set(ready, scale, scales):
    made = ready("fp16", steps=3, precision={"policy": "fp16", "loss_scale": scale})
    whole = made.task.loss
    made = made.but(loss=lambda model, batch: whole(model, batch) * torch.inf)
    records = train_loop(made.prepared, made.task, made.recipe)
    seen = (r.loss_scale for r in records if isinstance(r, StepRecord))
    assert list(islice(seen, 3)) == scales


def test_patience_is_how_often_the_floor_may_overflow(ready):
    scale = {"init_scale": 4.0, "min_scale": 2.0, "max_skipped_steps": 3}
    made = ready("fp16", steps=20, precision={"policy": "fp16", "loss_scale": scale})
    whole = made.task.loss
    made = made.but(loss=lambda model, batch: whole(model, batch) * torch.inf)
    with pytest.raises(DivergedError, match="step 4: 3 steps in a row"):
        steps_of(made)


def test_a_scaled_group_that_matches_no_module_is_refused(ready):
    precision = {"policy": "fp16", "loss_scale": {"scale_groups": ("nowhere*",)}}
    with pytest.raises(ConfigError, match=r"nowhere"):
        ready("fp16", precision=precision)


def test_clipping_limits_the_update(ready):
    """One step of plain gradient descent moves the weights by lr times the clipped norm."""
    settings = {"optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0}, "clip_norm": 0.01}
    made = ready(steps=1, **settings)
    before = [p.detach().clone() for p in made.task.model.parameters()]
    (record,) = steps_of(made)
    moved = [a - b.detach() for a, b in zip(before, made.task.model.parameters(), strict=True)]
    norm = torch.linalg.vector_norm(torch.cat([m.flatten() for m in moved]).double()).item()
    assert record.grad_norm > 0.02
    # Rounding of the weights, of magnitude 1 and about 600 in number, blurs the difference.
    assert norm == pytest.approx(0.01, abs=600**0.5 * 2**-24)


def test_the_average_and_the_rate_follow_the_recipe(ready):
    made = ready(steps=4, ema={"decay": 0.5}, lr_schedule={"name": "linear"})
    assert made.prepared.has_ema
    assert [r.lr for r in steps_of(made)] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
