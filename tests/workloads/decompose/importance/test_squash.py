"""Squashing of importance logits, against its definition written out."""

import math

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.importance.squash import (
    BINOMIAL_SHIFT,
    both,
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
    with pytest.raises(ConfigError, match="must be one of leaky_hard, normal, hard, swish_hard"):
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


EDGES = [-math.inf, -2.0, -1e-6, 0.0, 1e-6, 0.25, 1.0, 1.0 + 2.0**-22, 1.5, math.inf]


def defined(z, given_low, given_up):
    """Return both importances and the gradient of the logits, by their definition in floats."""
    low = min(max(z, 0.0), 1.0)
    up = 1 + 0.01 * (z - 1) if z > 1 else low
    within = given_low if z <= 1 else 0.0
    leaked = within if z > 0 else 0.01 * min(given_low, 0.0)
    pressed = 0.01 * given_up if z > 1 else (given_up if z >= 0 else 0.0)
    return low, up, leaked + pressed


def check_both(dtype, *, step):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(z, low, up) for z in EDGES for low in (-3.0, 0.0, 2.0) for up in (-1.0, 0.5)]
    numbers = [torch.tensor(each, dtype=dtype, device=device) for each in zip(*cases, strict=True)]
    z, given_low, given_up = (each.view(1, 12, 5).mT for each in numbers)
    z.requires_grad_()
    low, up = both(z)
    (grad,) = torch.autograd.grad([low, up], z, [given_low, given_up])
    assert low.dtype == up.dtype == grad.dtype == dtype
    rows = zip(
        *(each.detach().flatten().tolist() for each in (z, given_low, given_up)), strict=True
    )
    expected = torch.tensor([defined(*each) for each in rows], dtype=torch.float64)
    for found, exact in zip((low, up, grad), expected.unbind(-1), strict=True):
        found = found.detach().flatten().double().cpu()
        torch.testing.assert_close(found, exact, rtol=step, atol=0)


def test_both_importances_of_logits_are_as_defined():
    check_both(torch.float64, step=1e-15)


@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2.0**-22), (torch.bfloat16, 2.0**-7)])
def test_the_kernel_squashes_as_defined(dtype, step):
    check_both(dtype, step=step)


@pytest.mark.interpreted
@pytest.mark.parametrize("wanted", [0, 1])
def test_the_kernel_gives_the_gradient_of_one_result_alone(wanted):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    z = torch.linspace(-2, 3, 2000, device=device, requires_grad=True)
    exact = z.detach().double().requires_grad_()
    down = torch.randn_like(z)
    (found,) = torch.autograd.grad(both(z)[wanted], z, down)
    (expected,) = torch.autograd.grad(both(exact)[wanted], exact, down.double())
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.interpreted
def test_what_is_no_number_stays_none_through_the_kernel():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    z = torch.tensor([math.nan, -1.0, 0.5], device=device, requires_grad=True)
    low, up = both(z)
    assert low.isnan().tolist() == up.isnan().tolist() == [True, False, False]
    down = torch.tensor([0.0, math.nan, math.nan], device=device)
    (grad,) = torch.autograd.grad(low, z, down)
    assert grad.isnan().tolist() == [False, True, True]
