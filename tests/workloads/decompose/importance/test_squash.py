"""Squashing of importance logits, against its definition written out."""

import math

import pytest
import torch

from narrowcast.errors import RecipeError
from narrowcast.workloads.decompose.importance.squash import (
    BINOMIAL_SHIFT,
    importances,
    lower,
    shifted,
    upper,
)

TABLE = [
    # logit, gradient given, value, gradient returned
    (-2.0, -3.0, 0.0, -0.03),  # wants to rise: a hundredth of it
    (-2.0, 3.0, 0.0, 0.0),
    (0.0, -3.0, 0.0, -0.03),
    (0.0, 3.0, 0.0, 0.0),
    (0.25, 3.0, 0.25, 3.0),
    (0.25, -3.0, 0.25, -3.0),
    (1.0, 3.0, 1.0, 3.0),
    (1.0, -3.0, 1.0, -3.0),
    (1.5, 3.0, 1.0, 0.0),
    (1.5, -3.0, 1.0, 0.0),
]


@pytest.mark.parametrize(("logit", "given", "value", "returned"), TABLE)
def test_the_lower_leaky_sigmoid_has_the_backward_pass_of_the_table(logit, given, value, returned):
    z = torch.tensor([logit], dtype=torch.float64, requires_grad=True)
    g = lower(z)
    g.backward(torch.tensor([given], dtype=torch.float64))
    assert g.item() == value
    assert z.grad.item() == returned


@pytest.mark.parametrize(
    ("logit", "value", "slope"), [(-1.0, 0.0, 0.0), (0.5, 0.5, 1.0), (3.0, 1.02, 0.01)]
)
def test_the_upper_leaky_sigmoid_goes_on_rising_above_one(logit, value, slope):
    z = torch.tensor(logit, dtype=torch.float64, requires_grad=True)
    g = upper(z)
    g.backward()
    assert g.item() == pytest.approx(value, rel=1e-15)
    assert z.grad.item() == slope


def swish_hard(z):
    swish = [x / (1 + math.exp(-10 * x)) for x in (z, z - 1)]
    return swish[0] - swish[1]


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("normal", lambda z: 1 / (1 + math.exp(-z))),
        ("hard", lambda z: min(max(z, 0.0), 1.0)),
        ("swish_hard", swish_hard),
    ],
)
def test_other_kinds_squash_alike_for_masks_and_for_losses(kind, definition):
    z = torch.linspace(-3, 4, 29, dtype=torch.float64)
    expected = torch.tensor([definition(each) for each in z.tolist()], dtype=torch.float64)
    torch.testing.assert_close(lower(z, kind), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(lower(z, kind), upper(z, kind))


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(RecipeError, match="write one of leaky_hard, normal, hard, swish_hard"):
        lower(torch.zeros(1), "soft")


def test_binomial_sampling_spreads_logits_by_noise_of_its_share():
    z = torch.linspace(-1, 2, 1000, dtype=torch.float64)
    noise = ((1 + BINOMIAL_SHIFT) * z - shifted(z, "binomial")) / BINOMIAL_SHIFT
    assert noise.min() >= -1e-12
    assert noise.max() <= 1 + 1e-12
    assert 0.4 < noise.mean() < 0.6  # 0.5 within 0.1: 11 standard deviations of 1000 draws
    assert shifted(z, "continuous") is z


def test_losses_press_on_logits_that_no_noise_has_touched():
    z = [torch.full((1, 500, 2), 0.5, dtype=torch.float64)]
    masking, pressed = importances(z, sampling="binomial")
    assert torch.equal(pressed[0], z[0])
    assert masking[0].unique().numel() > 900


def test_the_lower_leaky_sigmoid_is_compiled_whole():
    z = torch.tensor([-1.0, 0.5, 2.0, -1.0], requires_grad=True)
    given = torch.tensor([-1.0, 2.0, 3.0, 1.0])
    compiled = torch.compile(lower, fullgraph=True, backend="eager")
    (grad,) = torch.autograd.grad(compiled(z), z, given)
    assert torch.equal(grad, torch.tensor([-0.01, 2.0, 0.0, 0.0]))
