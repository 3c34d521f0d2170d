"""Law 2: an all-fp32 policy changes nothing; weights equal plain torch's bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

STEPS, ACCUMULATE = 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.recurrent(x)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = self.drop(self.attention(x, x, x, need_weights=False)[0])
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


OPTIMIZERS = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
SCHEDULES = {
    "none": None,
    "warm-up": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
}
SETTINGS = [
    ("fp32", None, "none"),
    ("fp32", 0.5, "warm-up"),
    ("conservative", 0.5, "cosine"),
    ("compute=fp32, master=fp32", None, "cosine"),
    ("fp32; blocks.*: fp32", 0.5, "none"),
]


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(ACCUMULATE)]


def plain_loop(model, optimizer, scheduler, clip_norm):
    for batch in batches():
        for ids in batch:
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / ACCUMULATE
            loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def prepared_loop(model, optimizer, scheduler, clip_norm, policy):
    run = nc.prepare(model, optimizer, policy=policy, clip_norm=clip_norm, scheduler=scheduler)
    for batch in batches():
        for ids in batch:
            with run.autocast():
                loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / ACCUMULATE
            run.backward(loss)
        assert run.step().applied
    return run


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("policy", "clip_norm", "schedule"), SETTINGS)
def test_an_fp32_policy_trains_to_the_weights_of_plain_torch(
    optimizer, policy, clip_norm, schedule
):
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    ends = []
    for each in (model, plain):
        built = optimizer(each.parameters())
        scheduler = SCHEDULES[schedule] and SCHEDULES[schedule](built)
        torch.manual_seed(1)  # dropout
        if each is plain:
            plain_loop(each, built, scheduler, clip_norm)
        else:
            prepared_loop(each, built, scheduler, clip_norm, policy)
        ends.append((each.state_dict(), built.state_dict()))
    mine, theirs = ends
    assert all(torch.equal(mine[0][key], value) for key, value in theirs[0].items())
    torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=0)


def test_a_schedule_that_moves_momentum_as_well_is_followed():
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    ends = []
    for each in (model, plain):
        built = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        scheduler = OneCycleLR(built, max_lr=0.2, total_steps=STEPS + 1)
        torch.manual_seed(1)
        if each is plain:
            plain_loop(each, built, scheduler, None)
        else:
            prepared_loop(each, built, scheduler, None, "fp32")
        ends.append(each.state_dict())
    assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items())


def test_an_fp32_policy_leaves_a_model_what_it_is_and_gives_its_classes_back():
    model = Model()
    classes, printed = [type(m) for m in model.modules()], str(model)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    assert all(isinstance(m, kind) for m, kind in zip(model.modules(), classes, strict=True))
    assert [type(m).__name__ for m in model.modules()] == [kind.__name__ for kind in classes]
    assert str(model) == printed
    run.release()
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("scale", [1.0, 2.0**18])
def test_a_loss_scale_on_fp32_changes_no_bit(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8)
    run = nc.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        policy="fp32",
        loss_scale=nc.LossScale(init_scale=scale),
    )
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(5):
        run.step(model(x).square().mean())
        plain(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
