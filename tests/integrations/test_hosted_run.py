import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis.strategies import booleans, lists
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.integrations.hosted_run import HostedRun, HostedSettings, widen_trained


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


def batches(bad):
    generator = torch.Generator().manual_seed(1)
    for is_bad in bad:
        x = torch.randn(16, 8, generator=generator)
        y = torch.randint(0, 4, (16,), generator=generator)
        yield (x * torch.inf if is_bad else x), y


def host_loop(model, hosted, scheduler, bad):
    for x, y in batches(bad):
        with hosted.autocast():
            loss = F.cross_entropy(model(x), y)
        hosted.backward(loss)
        hosted.clip_norm(0.5)
        hosted.step()
        scheduler.step()


@given(bad=lists(booleans(), min_size=1, max_size=8))
def test_host_loop_equals_own_loop_bit_for_bit_whatever_is_skipped(bad):
    model, optimizer, scheduler = build()
    run = nc.prepare(model, optimizer, policy="fp16", clip_norm=0.5, scheduler=scheduler)
    for x, y in batches(bad):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
    expected, lr = run.fp32_state_dict(), scheduler.get_last_lr()

    model, optimizer, scheduler = build()
    hosted = HostedRun(HostedSettings("fp16"), model, optimizer)
    hosted.hold_scheduler(scheduler)
    host_loop(model, hosted, scheduler, bad)
    assert scheduler.get_last_lr() == lr
    assert hosted.logs()["skipped_steps"] == sum(bad)
    for name, weight in hosted.run.fp32_state_dict().items():
        assert torch.equal(weight, expected[name])


def test_scheduler_that_the_host_steps_once_per_epoch_moves_after_a_skipped_last_step():
    model, optimizer, scheduler = build()
    hosted = HostedRun(HostedSettings("bf16"), model, optimizer)
    hosted.hold_scheduler(scheduler)
    for x, y in batches([False, False, True]):
        with hosted.autocast():
            loss = F.cross_entropy(model(x), y)
        hosted.backward(loss)
        hosted.step()
    scheduler.step()
    assert scheduler.last_epoch == 1
    hosted.release()
    assert type(scheduler) is torch.optim.lr_scheduler.CosineAnnealingLR


def test_schedule_changes_the_policy_and_resumes_in_the_phase_of_the_checkpoint():
    settings = HostedSettings("fp32", schedule={3: "bf16, params=bf16, master=split"})
    model, optimizer, scheduler = build()
    hosted = HostedRun(settings, model, optimizer)
    host_loop(model, hosted, scheduler, [False] * 5)
    assert model[0].weight.dtype == torch.bfloat16
    state = copy.deepcopy(hosted.state_dict())

    fresh, optimizer, _ = build()
    resumed = HostedRun(settings, fresh, optimizer)
    resumed.load_state_dict(state)
    expected = hosted.run.fp32_state_dict()
    for name, weight in resumed.run.fp32_state_dict().items():
        assert torch.equal(weight, expected[name])


def test_trainable_bf16_weights_become_fp32_exactly_and_frozen_ones_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[0].requires_grad_(requires_grad=False)
    before = model[1].weight.detach().clone()
    assert widen_trained(model) == 2
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(model[1].weight.bfloat16(), before)


def test_misspelt_setting_suggests_the_right_name():
    with pytest.raises(ConfigError, match="did you mean ema_decay"):
        HostedSettings("bf16", prepare={"ema_decy": 0.9})


def test_misspelt_policy_raises_before_training():
    with pytest.raises(ConfigError, match="bf61"):
        HostedSettings("fp32", schedule={10: "bf61"})
