"""Advice that is a policy, taken at its word: with it the step that went wrong is finite."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

WIDTH = 8


class Einsum(nn.Module):
    """A product of a module's own code, between two layers."""

    def __init__(self, big=1e3):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.big = big

    def forward(self, x):
        scores = torch.einsum("bi,bj->bij", self.a(x) * self.big, x * self.big)
        return self.b(F.layer_norm(scores.float().mean(1), [WIDTH]))


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1), fused

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fused:  # its scores are fp32, its operands are not
            q, k, v = (each[None] for each in (q * 1e6, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=1e-6)[0]
        else:
            q, k = q * 4e2, k * 4e2
            mixed = torch.softmax(q @ k.T - (q @ k.T).max(-1, keepdim=True).values, -1) @ v
        return self.out(mixed)


class Inside(nn.Module):
    """A model that has the part as a module of its own, and nothing else of its own."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.head = nn.Linear(WIDTH, WIDTH), part, nn.LazyLinear(4)

    def forward(self, x):
        return self.head(self.part(self.first(x)))


class Normed(nn.Module):
    """A layer whose results are too large for fp16, and are small again afterwards."""

    def __init__(self, layer, big):
        super().__init__()
        self.layer = layer
        with torch.no_grad():
            layer.weight.mul_(big)

    def forward(self, x):
        y = self.layer(x).flatten(1)
        return F.layer_norm(y.float(), y.shape[1:])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight.mul_(6e2)

    def forward(self, x):
        return F.layer_norm(self.head(self.mix(self.embedding(x)) * 50).float(), [16])


def linear():
    return Inside(Normed(nn.Linear(WIDTH, WIDTH), 1e6))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = Normed(nn.Conv2d(1, 2, 3), 1e6), nn.Linear(2 * 36, 4)

    def forward(self, x):
        return self.head(self.conv(x))


def x(*shape):
    return torch.randn(*shape or (4, WIDTH), generator=torch.Generator().manual_seed(1))


def mean_of(output, batch):
    return output.float().square().mean()


def own_product(output, batch):
    """A loss that multiplies itself, outside the model."""
    return (torch.einsum("bi,ci->bc", output * 1e3, output * 1e3).float() * 1e-9).mean()


CASES = {
    "linear": (linear, x(), mean_of, {"part.layer": "bf16"}),
    "conv": (Image, x(4, 1, 8, 8), mean_of, {"conv.layer": "bf16"}),
    "einsum in a module": (lambda: Inside(Einsum()), x(), mean_of, {"part": "bf16"}),
    "matmul in a module": (lambda: Inside(Attention(fused=False)), x(), mean_of, {"part": "bf16"}),
    "attention in a module": (
        lambda: Inside(Attention(fused=True)),
        x(),
        mean_of,
        {"part": "bf16"},
    ),
    "einsum in the model": (Einsum, x(), mean_of, {}),
    "the loss": (linear, x(), own_product, None),
    "a tied weight": (Tied, torch.arange(8), mean_of, {"head": "bf16"}),
}


def prepared(model, policy):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return nc.prepare(model, optimizer, policy=policy, emulate=True)


@pytest.mark.parametrize("case", CASES)
def test_what_is_advised_makes_the_step_finite(case):
    build, batch, loss_of, exceptions = CASES[case]
    torch.manual_seed(0)
    model = build()
    model(batch)  # lazy layers learn their size
    plain = copy.deepcopy(model)
    run = prepared(model, "fp16")
    verdict = nc.explain(run, [batch], lambda b: loss_of(model(b), b))
    assert verdict.origin == "model"
    if exceptions is not None:
        assert verdict.remedy.exceptions == exceptions
    (text,) = re.findall(r'policy="(.*)"', verdict.advice())
    assert text != "fp16"
    again = prepared(plain, text)
    for _ in range(20):  # a loss scale may still have to give way
        with again.autocast():
            loss = loss_of(plain(batch), batch)
        outcome = again.step(loss)
        if outcome.applied:
            break
        told = nc.explain(
            again, [batch], lambda b: loss_of(plain(b), b), loss_scale=outcome.loss_scale
        )
        assert "backs off by itself" in told.advice()
    assert outcome.applied
    assert math.isfinite(loss.item())


def test_words_of_an_exception_that_are_about_weights_are_kept():
    torch.manual_seed(0)
    model = linear()
    model(x())
    run = prepared(model, "fp16, params=bf16; part: params=fp32; head: fp32")
    verdict = nc.explain(run, [x()], lambda b: mean_of(model(b), b))
    assert verdict.advice().startswith(
        'try policy="compute=fp16, params=bf16, master=fp32; '
        'part: params=fp32; head: fp32; part.layer: bf16, params=fp32"'
    )


def test_no_format_is_advised_where_none_helps():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    run = prepared(model, "bf16")
    verdict = nc.explain(run, [x()], lambda b: (model(b) * 0).log().mean())
    assert verdict.remedy is None
    assert verdict.advice().startswith("no format helps")
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    verdict = nc.explain(run, [x()], lambda b: model(b).mean())
    assert (verdict.module, verdict.remedy) == ("0", None)
    assert "policy" not in verdict.advice()


def test_digits_that_a_format_lost_are_found_to_be_the_cause():
    """A probability that bf16 rounds to one, whose complement has a logarithm in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1 - 1e-3)
    run = prepared(model, "bf16")
    verdict = nc.explain(run, [x()], lambda b: -torch.log(1 - model(b).float()).mean())
    assert verdict.role == "loss"
    assert verdict.advice().startswith('try policy="fp32"')


def test_a_static_scale_does_not_give_way():
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    scale = nc.LossScale(init_scale=2.0**20, max_scale=2.0**20, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp16", loss_scale=scale, emulate=True)
    verdict = nc.explain(run, [x()], lambda b: model(b).sum())
    assert verdict.advice() == (
        "the loss scale is too high for this gradient: write a smaller LossScale.init_scale"
    )


def test_a_recipe_is_told_its_own_settings():
    torch.manual_seed(0)
    model = linear()
    model(x())
    run = prepared(model, "fp16")
    run.engine.log.wording = replace(run.engine.log.wording, in_recipe=True)
    verdict = nc.explain(run, [x()], lambda b: mean_of(model(b), b))
    assert verdict.advice() == (
        'try precision.overrides={"part.layer": bf16}: with it this step is finite. '
        "Or a lower optimizer.lr, or clip_norm=1"
    )


@pytest.mark.parametrize("policy", ["fp16", "fp8-delayed", "fp8-tensor, params=bf16"])
def test_what_is_tried_leaves_the_model_as_it_was(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 16))
    groups = {"scale_groups": ["0"]} if policy == "fp16" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy=policy, emulate=True, **groups)
    data = torch.randn(8, 16)
    with run.autocast():
        loss = model(data).square().mean()
    run.step(loss)
    before = [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
    plan, entry, fp8 = run.plan, run.engine.entry, run.engine.fp8
    with run.autocast():
        expected = model(data)
    verdict = nc.explain(run, [data], lambda b: model(b * 1e18 * 1e18).mean())
    assert verdict is not None
    after = [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
    assert after == before
    assert (run.plan, run.engine.entry, run.engine.fp8) == (plan, entry, fp8)
    with run.autocast():
        assert torch.equal(model(data), expected)


def test_where_there_is_no_memory_to_try_formats_the_verdict_stands():
    torch.manual_seed(0)
    model = linear()
    model(x())
    run = prepared(model, "fp16")
    classes = [type(module) for module in model.modules()]
    taken = []

    def loss_of(batch):
        taken.append(None)
        if len(taken) > 1:
            raise torch.OutOfMemoryError
        return mean_of(model(batch), batch)

    verdict = nc.explain(run, [x()], loss_of)
    assert verdict.module == "part.layer"
    assert verdict.advice().startswith("try a wider format for part.layer")
    assert [type(module) for module in model.modules()] == classes
