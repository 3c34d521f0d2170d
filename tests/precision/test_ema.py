import pytest
import torch
from torch import nn

import narrowcast as nc

DECAY = 0.75


def trained(policy, *, bad=(), steps=6, decay=DECAY):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy=policy, ema_decay=decay)
    seen = []
    for step in range(steps):
        x = torch.full((2, 4), float("nan") if step in bad else float(step + 1))
        with run.compute():
            loss = model(x).float().square().mean()
        run.step(loss)
        seen.append({k: v.clone() for k, v in run.full_weights().items()})
    return model, run, seen


@pytest.mark.parametrize("bad", [(), (0,), (2, 3), (5,)])
def test_the_average_equals_torchs_over_the_applied_steps_alone(bad):
    torch.manual_seed(0)
    start = nn.Linear(4, 4)
    model, run, seen = trained("fp32", bad=bad)
    averaged = torch.optim.swa_utils.AveragedModel(
        start, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    averaged.update_parameters(start)
    for step, weights in enumerate(seen):
        if step not in bad:
            start.load_state_dict(weights)
            averaged.update_parameters(start)
    with run.averaged():
        for mine, theirs in zip(model.parameters(), averaged.module.parameters(), strict=True):
            # Six lerps in fp32, each within an ulp.
            torch.testing.assert_close(mine, theirs, rtol=12 * 2.0**-24, atol=12 * 2.0**-24)


def fail_unless_averaged(model, before):
    assert not torch.equal(model.weight.float(), before["weight"])
    raise ValueError("on purpose")


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split", "bf16-pure"])
def test_the_weights_are_back_when_the_block_ends_even_by_an_error(policy):
    model, run, _ = trained(policy)
    before = {k: v.clone() for k, v in run.full_weights().items()}
    with pytest.raises(ValueError, match="on purpose"), run.averaged():
        fail_unless_averaged(model, before)
    assert all(torch.equal(v, before[k]) for k, v in run.full_weights().items())


def test_without_an_average_the_block_changes_nothing():
    model, run, _ = trained("fp32", decay=None)
    before = model.weight.detach().clone()
    with run.averaged():
        assert torch.equal(model.weight, before)
    assert not run.has_average


def test_the_average_of_sixteen_bit_weights_moves_by_less_than_they_can():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    policy = "fp32, params=bf16, master=split"
    run = nc.prepare(model, optimizer, policy=policy, ema_decay=0.5)
    run.step(-model.weight.float().sum())
    average = run.state_dict()["average"][0]
    assert (average == 1 + 2.0**-13).all()
