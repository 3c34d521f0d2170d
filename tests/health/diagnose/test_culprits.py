"""Small models of many kinds, with something put into them that goes wrong: who is blamed for it.

One that is blamed wrongly sends its owner the wrong way, so that each fault has the one name that
is right: the batch, a weight, a module's arithmetic, the loss, the scale.
"""

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

WORDS = {
    math.inf: "an infinity",
    -math.inf: "a negative infinity",
    1e30: "1.0e30",
}
POLICIES = ("fp32", "bf16", "fp16")
WIDTH, LENGTH = 8, 5


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Encoder(nn.Module):
    """torch's own encoder, which is given a mask of infinities."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, mask):
        return self.head(self.layer(x, src_mask=mask).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class Attending(nn.Module):
    """Attention of one's own, by einsum, with a mask that it is given."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, *, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.einsum("bik,bjk->bij", q, k).float() + mask
        return self.head(torch.einsum("bij,bjk->bik", scores.softmax(-1), v).mean(1))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(16, WIDTH, mode="sum"), nn.Linear(WIDTH, 3)

    def forward(self, x, words):
        return self.head(self.bag(words, per_sample_weights=x))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mean, log_variance = self.encode(x).float().chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return self.decode(z), divergence


def vae_loss(model):
    def loss_of(batch):
        output, divergence = model(batch["x"])
        return F.mse_loss(output.float(), batch["x"]) + divergence

    return loss_of


def loss_on(model, **names):
    def loss_of(batch):
        given = {name: batch[key] for name, key in names.items()}
        return F.mse_loss(model(batch["x"], **given).float(), batch["y"])

    return loss_of


def causal():
    return torch.triu(torch.full((LENGTH, LENGTH), -math.inf), 1)


def made(name):
    torch.manual_seed(0)
    x, y = torch.randn(4, LENGTH, WIDTH), torch.randn(4, 3)
    match name:
        case "perceptron":
            model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 3))
            return model, {"x": x[:, 0], "y": y}, loss_on(model)
        case "convolutions":
            model = Convolutions()
            return model, {"x": torch.randn(4, 1, 6, 6), "y": y}, loss_on(model)
        case "encoder":
            model = Encoder()
            return model, {"mask": causal(), "x": x, "y": y}, loss_on(model, mask="mask")
        case "recurrent":
            model = Recurrent()
            return model, {"x": x, "y": y}, loss_on(model)
        case "attending":
            model = Attending()
            return model, {"mask": causal(), "x": x, "y": y}, loss_on(model, mask="mask")
        case "bags":
            model, words = Bags(), torch.randint(0, 16, (4, LENGTH))
            return model, {"x": x[:, :, 0], "words": words, "y": y}, loss_on(model, words="words")
        case "autoencoder":
            model = Autoencoder()
            return model, {"x": x[:, 0]}, vae_loss(model)
    raise AssertionError(name)


MODELS = ("perceptron", "convolutions", "encoder", "recurrent", "attending", "bags", "autoencoder")
PRODUCTS = {
    "perceptron": "0",
    "convolutions": "conv",
    "encoder": "layer.linear1",
    "recurrent": "cells",
    "attending": "qkv",
    "bags": "head",
    "autoencoder": "decode",
}


def enlarge(model, name, times):
    with torch.no_grad():
        for weight in model.get_submodule(PRODUCTS[name]).parameters():
            weight.mul_(times)


def prepared(name, policy="fp32", *, times=1.0, **settings):
    """Make a model ready; the weights of its product are so many times what they would be."""
    model, batch, loss_of = made(name)
    enlarge(model, name, times)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = nc.prepare(model, optimizer, policy=policy, emulate=True, **settings)
    return run, batch, loss_of


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_said_where_nothing_is_wrong(name, policy):
    run, batch, loss_of = prepared(name, policy)
    assert nc.explain(run, [batch], loss_of, loss_scale=1024.0) is None


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [math.nan, *WORDS])
@pytest.mark.parametrize("name", MODELS)
def test_a_bad_number_that_goes_in_is_the_batchs(name, bad, policy):
    run, batch, loss_of = prepared(name, policy)
    batch["x"] = batch["x"].clone()
    batch["x"].view(-1)[3] = bad
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.origin, verdict.module, verdict.remedy) == ("data", "", None)
    assert f"holds {WORDS.get(bad, 'a NaN')} at batch['x'][0, " in verdict.sentence
    assert verdict.kind == ("nan" if math.isnan(bad) else "large" if bad == 1e30 else "inf")


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "autoencoder"])
def test_a_bad_target_is_the_batchs(name, bad):
    run, batch, loss_of = prepared(name, "bf16")
    batch["y"][2, 1] = bad
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.origin, verdict.sample) == ("data", 2)
    assert "at batch['y'][2, 1], 1 of 12 values" in verdict.sentence


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["encoder", "attending"])
def test_a_mask_is_not_blamed_for_what_it_did_not_do(name, policy):
    run, batch, loss_of = prepared(name, policy)
    with torch.no_grad():
        run.model.head.weight.fill_(3e38)
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.origin, verdict.module) == ("model", "head")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mask_that_leaves_nothing_to_attend_to_is_blamed(policy):
    run, batch, loss_of = prepared("attending", policy)
    batch["mask"] = torch.full((LENGTH, LENGTH), -math.inf)
    verdict = nc.explain(run, [batch], loss_of)
    assert verdict.origin == "data"
    assert "a negative infinity at batch['mask'][0, 0], 25 of 25 values" in verdict.sentence


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", MODELS)
def test_a_bad_weight_is_the_weights(name, bad, policy):
    run, batch, loss_of = prepared(name, policy)
    module = run.model.get_submodule(PRODUCTS[name])
    with torch.no_grad():
        next(module.parameters()).view(-1)[1] = bad
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.module, verdict.role, verdict.origin) == (PRODUCTS[name], "weight", "model")
    assert "earlier checkpoint" in verdict.advice()


def is_healed(name, advice, *, times=1.0, factor=1.0):
    """Take the advice at its word, and a step with it that is otherwise the same."""
    (policy,) = re.findall(r'try policy="(.*)": with it this step is finite', advice)
    run, batch, loss_of = prepared(name, policy, times=times)
    return nc.explain(run, [batch], lambda b: loss_of(b) * factor, loss_scale=1.0) is None


@pytest.mark.parametrize("name", MODELS)
def test_what_fp16_cannot_hold_is_its_modules_and_what_is_advised_helps(name):
    run, batch, loss_of = prepared(name, "fp16", times=3e5)
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.module, verdict.origin) == (PRODUCTS[name], "model")
    assert is_healed(name, verdict.advice(), times=3e5)


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_for_a_weight_that_no_format_holds_none_is_advised(name, policy):
    run, batch, loss_of = prepared(name, policy, times=1e30)
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.module, verdict.role) == (PRODUCTS[name], "weight")
    assert "earlier checkpoint" in verdict.advice()


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_no_scale_makes_small_enough_needs_wider_formats(name):
    run, batch, loss_of = prepared(
        name, "fp16", loss_scale=nc.LossScale(init_scale=1.0, max_scale=1.0)
    )
    verdict = nc.explain(run, [batch], lambda b: loss_of(b) * 1e9)
    assert (verdict.phase, verdict.origin) == ("backward", "model")
    assert is_healed(name, verdict.advice(), factor=1e9)


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_the_scale_made_too_large_is_the_scales(name):
    scale = nc.LossScale(init_scale=2.0**40, max_scale=2.0**40)
    run, batch, loss_of = prepared(name, "fp16", loss_scale=scale)
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.phase, verdict.origin) == ("backward", "model")
    assert "backs off by itself" in verdict.advice()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent"])
def test_a_logarithm_of_zero_in_the_loss_is_the_losss(name, policy):
    run, batch, _ = prepared(name, policy)
    verdict = nc.explain(run, [batch], lambda b: run.model(b["x"]).float().relu().log().mean())
    assert (verdict.role, verdict.origin, verdict.remedy) == ("loss", "model", None)
    assert "logarithm" in verdict.advice()


def test_an_exponential_that_overflows_is_made_between_two_layers():
    run, batch, loss_of = prepared("autoencoder", "bf16")
    with torch.no_grad():
        run.model.encode.bias[WIDTH:].fill_(200.0)
    verdict = nc.explain(run, [batch], loss_of)
    assert (verdict.module, verdict.role, verdict.origin) == ("decode", "input", "model")
    assert verdict.evidence == "made between encode and it"


class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log(torch.relu(x))


def test_a_module_that_makes_a_negative_infinity_is_named_where_it_does_harm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Logarithm(), nn.Linear(WIDTH, 1))
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    verdict = nc.explain(run, [torch.randn(4, WIDTH)], lambda x: model(x).mean())
    assert (verdict.module, verdict.role, verdict.origin) == ("1", "output", "model")
    assert verdict.sentence.startswith("1 output became infinite")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda x: x, "batch[2, 1]"),
        (lambda x: [[x]], "batch[0][0][2, 1]"),
        (lambda x: {"in": {"x": x}}, "batch['in']['x'][2, 1]"),
        (lambda x: Pair(torch.ones(1), x), "batch[1][2, 1]"),
        (lambda x: Fields(torch.ones(1), x), "batch.y[2, 1]"),
        (lambda x: SimpleNamespace(x=[x]), "batch.x[0][2, 1]"),
    ],
)
def test_a_bad_number_is_found_however_a_batch_is_nested(wrap, where):
    model = nn.Linear(WIDTH, 1)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    x = torch.ones(4, WIDTH)
    x[2, 1] = -math.inf

    def loss_of(batch):
        match batch:
            case torch.Tensor():
                return model(batch).mean()
            case list():
                return loss_of(batch[0])
            case dict():
                return loss_of(next(iter(batch.values())))
            case SimpleNamespace():
                return loss_of(batch.x)
            case _:
                return loss_of(batch.y)

    assert nc.explain(run, [wrap(x)], loss_of).sentence.startswith(
        f"the batch itself holds a negative infinity at {where}, 1 of 32 values"
    )


def test_what_a_loss_hands_to_the_model_itself_is_found_by_the_arguments_name():
    run, batch, _ = prepared("attending", "bf16")
    x = batch["x"].clone()
    x[1, 2, 3] = -math.inf

    def loss_of(_):
        return run.model(x, mask=torch.zeros(LENGTH, LENGTH)).float().mean()

    verdict = nc.explain(run, [None], loss_of)
    assert verdict.origin == "data"
    assert verdict.sentence.startswith(
        "what the model is given holds a negative infinity at x[1, 2, 3], 1 of 160 values"
    )


def test_a_batch_that_gradients_are_asked_of_is_a_batch_too():
    model = nn.Linear(WIDTH, 1)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    x = torch.ones(4, WIDTH)
    x[3, 2] = -math.inf
    verdict = nc.explain(run, [x.requires_grad_()], lambda batch: model(batch).mean())
    assert verdict.sentence.startswith("the batch itself holds a negative infinity at batch[3, 2]")


def test_one_number_alone_may_be_bad_and_tensors_that_hold_none_may_be_there():
    model = nn.Linear(WIDTH, 1)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    batch = {
        "empty": torch.zeros(0, 3),
        "words": torch.arange(3),
        "sparse": torch.eye(2).to_sparse(),
        "weight": torch.tensor(math.nan),
    }
    verdict = nc.explain(run, [batch], lambda b: model(torch.ones(1, WIDTH)).mean() * b["weight"])
    assert "a NaN at batch['weight'], 1 of 1 values" in verdict.sentence
