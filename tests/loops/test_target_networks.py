"""A network that follows another: a DQN's target, and MoCo's momentum encoder and queue."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

STEPS = 8
GENERATOR = torch.Generator().manual_seed(3)
STATES = torch.randn(STEPS, 16, 4, generator=GENERATOR)
NEXT = torch.randn(STEPS, 16, 4, generator=GENERATOR)
ACTIONS = torch.randint(0, 3, (STEPS, 16, 1), generator=GENERATOR)
REWARDS = torch.rand(STEPS, 16, generator=GENERATOR)
VIEWS = torch.randn(STEPS, 2, 8, 12, generator=GENERATOR)


def q_network():
    torch.manual_seed(0)
    q = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    return q, torch.optim.Adam(q.parameters(), lr=1e-2)


def td_loss(q, target, i):
    with torch.no_grad():
        best = target(NEXT[i]).max(1).values
    chosen = q(STATES[i]).gather(1, ACTIONS[i]).squeeze(1)
    return F.smooth_l1_loss(chosen, REWARDS[i] + 0.9 * best)


@torch.no_grad()
def follow(target, weights, *, soft, i):
    """Move a target network, a little in every step, or all the way in every third."""
    if soft:
        for name, value in target.state_dict().items():
            value.lerp_(weights[name], 0.1)
    elif i % 3 == 2:
        target.load_state_dict(weights)


def plain_dqn(trained, *, soft):
    q, optimizer = q_network()
    target = copy.deepcopy(q)
    losses = []
    for i in range(STEPS):
        loss = td_loss(q, target, i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(target, q.state_dict(), soft=soft, i=i)
        losses.append(loss.item())
    return trained(losses, [q, target], [optimizer])


def dqn(trained, *, soft, copied, **settings):
    q, optimizer = q_network()
    target = copy.deepcopy(q)
    run = nc.prepare(q, optimizer, **settings)
    if copied == "after":
        target = copy.deepcopy(q)
    losses = []
    for i in range(STEPS):
        with run.autocast():
            loss = td_loss(q, target, i)
        run.step(loss)
        follow(target, run.fp32_state_dict(), soft=soft, i=i)
        losses.append(loss.item())
    run.release()
    return trained(losses, [q, target], [optimizer])


@pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
@pytest.mark.parametrize("copied", ["before", "after"])
def test_a_dqn_in_fp32_is_the_plain_one(trained, same, soft, copied):
    same(dqn(trained, policy="fp32", soft=soft, copied=copied), plain_dqn(trained, soft=soft))


@pytest.mark.parametrize("copied", ["before", "after"])
def test_a_dqn_trains_in_a_narrow_policy(trained, near, narrow_or_params, copied):
    mine = dqn(trained, soft=True, copied=copied, **narrow_or_params)
    near(mine, plain_dqn(trained, soft=True), products=4, **narrow_or_params)


class Contrast(nn.Module):
    """MoCo: an encoder that is trained, one that follows it, and a queue of its last answers."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.query.append(nn.Linear(16, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, 8), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, one, other):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(other), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().t()
        with torch.no_grad():
            rows = (self.place + torch.arange(len(k))) % len(self.queue)
            self.queue[rows] = k.to(self.queue.dtype)
            self.place.add_(len(k)).remainder_(len(self.queue))
        return torch.cat([positive, negative], 1) / 0.2

    @torch.no_grad()
    def follow(self, weights):
        for name, value in self.key.named_parameters():
            value.lerp_(weights[f"query.{name}"], 0.1)


def contrast():
    torch.manual_seed(0)
    model = Contrast()
    return model, torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)


LABELS = torch.zeros(8, dtype=torch.long)


def plain_moco(trained):
    model, optimizer = contrast()
    losses = []
    for one, other in VIEWS:
        model.follow(model.state_dict())
        loss = F.cross_entropy(model(one, other), LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def moco(trained, **settings):
    model, optimizer = contrast()
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for one, other in VIEWS:
        model.follow(run.fp32_state_dict())
        with run.autocast():
            loss = F.cross_entropy(model(one, other), LABELS)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


def test_moco_in_fp32_is_the_plain_one(trained, same):
    same(moco(trained, policy="fp32"), plain_moco(trained))


def test_moco_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    # Logits are divided by 0.2, which multiplies the error of what comes before them.
    mine, theirs = moco(trained, **narrow_or_params), plain_moco(trained)
    near(mine, theirs, products=3 * 5, **narrow_or_params)


def test_a_key_encoder_that_is_not_trained_keeps_its_digits_beside_weights_of_16_bits():
    model, optimizer = contrast()
    before = copy.deepcopy(model.key.state_dict())
    nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    assert model.query[0].weight.dtype == torch.bfloat16
    after = model.key.state_dict()
    assert all(v.dtype == after[k].dtype and torch.equal(v, after[k]) for k, v in before.items())


def test_a_skipped_step_gives_the_queue_back():
    model, optimizer = contrast()
    run = nc.prepare(model, optimizer, policy="bf16")
    queue, place = model.queue.clone(), model.place.clone()
    with run.autocast():
        loss = F.cross_entropy(model(VIEWS[0, 0] * float("inf"), VIEWS[0, 1]), LABELS)
    assert not run.step(loss).applied
    assert torch.equal(model.queue, queue)
    assert torch.equal(model.place, place)
