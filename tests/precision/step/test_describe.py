"""What a run and its steps print, of what the host knows."""

import math

import torch
from torch import nn

import narrowcast as nc


class Net(nn.Sequential):
    pass


def made(policy="fp16", **settings):
    torch.manual_seed(0)
    model = Net(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return nc.prepare(model, optimizer, policy=policy, emulate=True, **settings)


def step(run, factor=1.0):
    with run.autocast():
        loss = run.model(torch.ones(4, 8)).float().mean() * factor
    return run.step(loss)


def test_a_run_says_what_it_trains_and_how_far_it_has_come():
    run = made()
    step(run)
    step(run, math.nan)
    lines = str(run).splitlines()
    assert lines[0] == "Net, prepared"
    told = {line[:12].strip(): line[14:] for line in lines[1:]}
    assert told["policy"].startswith("fp16, emulated on ")
    assert told["weights"] == "90, stored in fp32, master none"
    assert told["update"].startswith("torch.optim.AdamW")
    assert told["steps"] == "1 applied, 1 skipped"
    assert told["loss scale"] == "32768"
    assert repr(run) == str(run)


def test_a_run_says_what_it_keeps_and_what_it_leaves_alone():
    torch.manual_seed(0)
    model = Net(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    policy = "bf16, params=bf16, master=split"
    run = nc.prepare(model, optimizer, policy=policy, emulate=True, fused_optimizer=True)
    assert "18 trained of 90, stored in bf16, master split" in str(run)
    assert "AdamW, the fused optimizer in plain torch" in str(run)
    assert "loss scale  none" in str(run)


def test_an_outcome_says_what_became_of_its_step():
    run = made()
    assert str(step(run)).startswith("<Outcome: step 1 applied; grad norm ")
    assert str(step(run)).endswith(", loss scale 65536, lr 0.001>")
    skipped = str(step(run, math.inf))
    assert skipped.startswith(
        "<Outcome: step 3 skipped: gradients of 4 of 4 weights are inf or NaN"
    )
    assert "65536 → 32768" in skipped


def test_a_step_that_the_host_does_not_know_of_is_said_to_be_one():
    run = made()
    step(run)
    run.engine.steps_begun += 1  # as on a GPU that has not come to its end
    assert "1 applied, 0 skipped; 1 more pending on the device" in str(run)
