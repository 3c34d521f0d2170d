"""The numbers of a step, from the device to the host."""

import torch
from torch import nn

import narrowcast as nc
from narrowcast.precision.step.outcome import NO_MODULE, Outcome, pack


def outcome(*, finite, norms, metered=False):
    number = torch.tensor
    packed = pack(
        finite=number(finite),
        norm=number(2.5),
        scale=number(16.0),
        next_scale=number(8.0),
        lost=number(0.25 if metered else 0.0),
        at_floor=number(False),
        norms=number(norms),
        bad_rank=number(-1),
        mixed=number(-1),
    )
    waits = []
    names = [(i, f"layer{i}.weight") for i in range(len(norms))]

    def sync():
        waits.append(None)
        made.arrive()

    made = Outcome(packed, step=3, names=names, lr=0.1, metered=metered, sync=sync)
    return made, waits


def test_nothing_waits_until_a_number_is_read_and_then_once():
    made, waits = outcome(finite=True, norms=[1.0, 2.0])
    assert (made.step, made.lr, len(waits)) == (3, 0.1, 0)
    assert (made.applied, made.grad_norm, made.loss_scale, made.next_scale) == (True, 2.5, 16, 8)
    assert len(waits) == 1


def test_the_bad_module_is_the_one_nearest_the_loss_and_none_where_only_the_sum_overflowed():
    inf = float("inf")
    made, _ = outcome(finite=False, norms=[inf, 1.0, float("nan"), 2.0])
    assert made.bad_parameters == ("layer0.weight", "layer2.weight")
    assert made.bad_module == "layer2"
    assert outcome(finite=False, norms=[1.0])[0].bad_module == NO_MODULE


def test_lost_updates_are_told_only_of_metered_steps_that_were_applied():
    assert outcome(finite=True, norms=[1.0], metered=True)[0].lost_updates == 0.25
    assert outcome(finite=True, norms=[1.0])[0].lost_updates is None
    assert outcome(finite=False, norms=[1.0], metered=True)[0].lost_updates is None


def test_printing_waits_for_nothing():
    made, waits = outcome(finite=True, norms=[1.0])
    assert str(made) == "<Outcome: step 3, lr 0.1; still running on the device>"
    assert not waits
    assert made.applied
    assert str(made) == "<Outcome: step 3 applied; grad norm 2.5, loss scale 16, lr 0.1>"


def test_a_weight_that_modules_share_is_as_near_the_loss_as_the_last_of_them():
    model = nn.Sequential()
    model.embed, model.norm, model.head = nn.Embedding(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
    model.head.weight = model.embed.weight
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    with run.autocast():
        loss = model(torch.tensor([0, 1])).sum() * float("nan")
    made = run.step(loss)
    assert made.bad_parameters == ("norm.weight", "norm.bias", "head.weight", "head.bias")
    assert made.bad_module == "head"
