"""Second derivatives through emulated products, against torch in fp64 and torch's own AMP."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.numerics import BF16
from narrowcast.precision.plan.policy import PRESETS
from narrowcast.precision.products.emulated import linear_product
from narrowcast.precision.products.modes import EmulatedProducts
from narrowcast.precision.products.operands import ProductFormats

pytestmark = pytest.mark.usefixtures("guarded")

BOUNDS = {
    "fp32": 2.0**-20,
    "tf32": 2.0**-8,
    "fp16": 2.0**-7,
    "bf16": 2.0**-4,
    "fp8-tensor": 0.35,
    "fp8-row": 0.35,
    "compute=mxfp8": 0.35,
}
"""Relative errors: some five roundings in a row, each of half a unit in the last place of the
narrowest operand (e5m2 keeps two bits)."""


def make(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def critic():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32)
    )


def penalty(model, x):
    """The penalty of a WGAN-GP: how far the norm of the critic's gradient is from one."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    return (slope.float().norm(dim=1) - 1).pow(2).mean()


def gradients_of(loss, model):
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters())[:-1])]
    )


@pytest.mark.parametrize("policy", BOUNDS)
def test_a_gradient_penalty_has_the_gradients_of_fp64(policy):
    x = make(1, 16, 32)
    wide = critic().double()
    exact = gradients_of(penalty(wide, x.double()), wide)
    model = critic()
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, emulate=True
    )
    with run.autocast():
        loss = penalty(model, x)
    assert error(gradients_of(loss, model), exact) < BOUNDS[policy]


@pytest.fixture(scope="module")  # made before a test refuses native products
def error_of_amp():
    x, wide, plain = make(1, 16, 32), critic().double(), critic()
    exact = gradients_of(penalty(wide, x.double()), wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return error(gradients_of(penalty(plain, x), plain), exact)


def test_a_gradient_penalty_is_as_near_to_fp64_as_that_of_torchs_own_amp(error_of_amp):
    x, wide, model = make(1, 16, 32), critic().double(), critic()
    exact = gradients_of(penalty(wide, x.double()), wide)
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16", emulate=True
    )
    with run.autocast():
        assert error(gradients_of(penalty(model, x), model), exact) < 2 * error_of_amp


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-tensor", "fp8-row", "compute=mxfp8"])
def test_second_derivatives_reach_the_input_through_the_gradient_of_the_weight(policy):
    formats = ProductFormats.of(nc.policy(policy))

    def derivative(linear, x, weight, dtype):
        x, weight = (t.to(dtype).requires_grad_() for t in (x, weight))
        hidden = x * 2  # not a leaf
        (first,) = torch.autograd.grad(
            linear(hidden, weight).pow(3).mean(), weight, create_graph=True
        )
        return torch.autograd.grad(first.pow(2).sum(), (x, weight))

    x, weight = make(0, 16, 32), make(1, 32, 32) / 6
    exact = derivative(F.linear, x, weight, torch.float64)
    found = derivative(
        lambda x, w: linear_product(x, w, None, formats=formats), x, weight, torch.float32
    )
    for mine, theirs in zip(found, exact, strict=True):
        assert error(mine, theirs) < BOUNDS[policy]


@pytest.mark.parametrize("policy", ["bf16", "fp8-tensor", "fp8-row", "fp8-block"])
def test_first_gradients_are_the_same_with_and_without_a_graph(policy):
    formats = ProductFormats.of(PRESETS[policy])
    tensors = [t.requires_grad_() for t in (make(0, 128, 128), make(1, 128, 128), make(2, 128))]
    grad = make(3, 128, 128)
    plain, again = (
        torch.autograd.grad(
            linear_product(*tensors, formats=formats), tensors, grad, create_graph=graph
        )
        for graph in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_third_derivatives_of_a_functional_product():
    def third(a, b):
        (one,) = torch.autograd.grad((a @ b).pow(4).sum(), a, create_graph=True)
        (two,) = torch.autograd.grad(one.pow(2).sum(), b, create_graph=True)
        return torch.autograd.grad(two.sum(), (a, b))

    tensors = [t.requires_grad_() for t in (make(0, 8, 8), make(1, 8, 8))]
    exact = third(*(t.detach().double().requires_grad_() for t in tensors))
    with EmulatedProducts(BF16):
        found = third(*tensors)
    for mine, theirs in zip(found, exact, strict=True):
        assert error(mine, theirs) < 2.0**-3


def test_the_input_is_not_kept_for_second_derivatives():
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x, weight = make(0, 64, 32).requires_grad_(), make(1, 32, 32).requires_grad_()
    formats = ProductFormats.of(PRESETS["bf16"])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear_product(x * 1, weight, None, formats=formats)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    # Both operands, rounded, and some bytes for the scalar of the multiplication and the link.
    assert sum(storages.values()) < x.nbytes + weight.nbytes + 64


@pytest.mark.parametrize(
    "policy",
    ["bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-delayed", "compute=mxfp8", "compute=nvfp4"],
)
def test_a_critic_learns_under_a_gradient_penalty(policy):
    model = critic()
    run = nc.prepare(
        model, torch.optim.Adam(model.parameters(), lr=3e-3), policy=policy, emulate=True
    )
    losses = []
    for step in range(12):
        real, fake = make(step, 16, 32) + 1, make(step + 100, 16, 32) - 1
        with run.autocast():
            loss = model(fake).mean() - model(real).mean() + 10 * penalty(model, (real + fake) / 2)
        losses.append(float(loss.detach()))
        run.step(loss)
        model.zero_grad()
    assert run.stats().applied >= 10
    assert losses[-1] < losses[0] / 2
