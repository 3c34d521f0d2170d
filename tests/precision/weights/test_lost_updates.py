import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.precision.weights.torch_update import SAMPLE, LostUpdates


def model_with(values):
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values))
    return model


def share_lost(values, gradients, policy, lr=1.0):
    model = model_with(values)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), policy=policy)
    loss = (model.weight.float() * torch.tensor(gradients)).sum()
    return run.step(loss).lost_updates


def test_the_share_is_an_exact_count_on_a_small_model():
    # At 1.0 bf16 steps by 2⁻⁷ upwards and 2⁻⁸ downwards; half of that is lost, more is not.
    gradients = [2.0**-9, 2.0**-8, 2.0**-10, 0.0, -(2.0**-9), -(2.0**-7), 0.0, 1.0]
    lost = [True, False, True, None, True, False, None, False]
    due = [each for each in lost if each is not None]
    assert share_lost([1.0] * 8, gradients, "fp32, params=bf16, master=none") == pytest.approx(
        sum(due) / len(due), abs=2.0**-24
    )


@pytest.mark.parametrize(
    ("master", "share"), [("none", 1.0), ("split", 0.0), ("fp32", 0.0), ("kahan", 0.0)]
)
def test_a_master_keeps_what_the_working_weight_loses(master, share):
    policy = f"fp32, params=bf16, master={master}"
    assert share_lost([1.0] * 4, [2.0**-12] * 4, policy) == share


def test_updates_that_fp32_loses_are_told():
    assert share_lost([1.0, 1.0], [2.0**-30, 1.0], "fp32") == 0.5


def test_nothing_due_is_nothing_lost():
    assert share_lost([1.0], [0.0], "fp32") == 0.0


def test_a_large_weight_is_looked_at_evenly():
    stored = torch.zeros(64 * SAMPLE)
    gradient = torch.ones(64 * SAMPLE)
    meter = LostUpdates([(stored,)], [gradient])
    stored[: 16 * SAMPLE] += 1  # a quarter moves
    assert float(meter.share()) == pytest.approx(0.75, abs=0.01)


def test_updates_that_only_some_columns_lose_are_seen_in_every_width():
    for width in (256, 384, 1000, 1024):
        stored = torch.zeros(256 * 1024 // width * 2, width)
        meter = LostUpdates([(stored,)], [torch.ones_like(stored)])
        stored[:, : width // 4] += 1
        assert float(meter.share()) == pytest.approx(0.75, abs=0.02)


def test_the_meter_looks_every_so_many_steps_and_can_be_turned_off():
    def measured(every):
        model = model_with([1.0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = nc.prepare(model, optimizer, policy="fp32", lost_updates_every=every)
        return [run.step(model.weight.sum()).lost_updates is not None for _ in range(7)]

    assert measured(3) == [True, False, False, True, False, False, True]
    assert not any(measured(0))


def test_a_skipped_step_measures_nothing():
    model = model_with([1.0])
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    assert run.step(model.weight.sum() * float("nan")).lost_updates is None
