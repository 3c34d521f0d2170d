"""The transforms of torch.func over prepared models, against loops, autograd and fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import narrowcast as nc

pytestmark = [
    pytest.mark.usefixtures("guarded"),
    # torch 2.13 itself scripts its formulas when forward derivatives are first used.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]
POLICIES = ["bf16", "fp16", "tf32", "fp8-tensor", "fp8-row", "fp8-delayed", "compute=mxfp8"]


class Small(nn.Module):
    """Linear layers with a bias and without, attention and products by hand."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        q, k, v = self.into(x).chunk(3, -1)
        attended = torch.softmax(q @ k.mT / 6, -1) @ v
        return self.out(F.gelu(self.norm(attended + x)))


def make(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found, exact):
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def prepared(policy):
    torch.manual_seed(0)
    model = Small()
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), policy=policy, emulate=True
    )
    if "delayed" in policy:  # so that there are scales from the past, with room for gradients
        with run.autocast():
            loss = 8 * model(make(9, 8, 32)).pow(2).mean()
        run.step(loss)
        model.zero_grad()
    return run, model


def loss_of(model):
    def loss(weights, x):
        return functional_call(model, weights, (x,)).float().pow(2).mean()

    return loss


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_each_sample_are_those_of_the_sample_alone(policy):
    run, model = prepared(policy)
    samples = make(1, 5, 8, 32)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with run.autocast():
        each = vmap(grad(loss_of(model)), in_dims=(None, 0))(weights, samples)
        alone = [
            torch.autograd.grad(model(x).float().pow(2).mean(), list(model.parameters()))
            for x in samples
        ]
    for i, (name, found) in enumerate(each.items()):
        expected = torch.stack([grads[i] for grads in alone])
        # Sums in another order may round differently: a unit of the output's 16 bits here or there.
        assert error(found, expected) < 2.0**-7, name


@pytest.mark.parametrize("policy", POLICIES)
def test_grad_and_vjp_are_what_autograd_says(policy):
    run, model = prepared(policy)
    x = make(1, 8, 32)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with run.autocast():
        found = grad(loss_of(model))(weights, x)
        value, pull = vjp(model, x)
        (pulled,) = pull(torch.full_like(value, 2.0**-10))
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(model(x).float().pow(2).mean(), list(model.parameters()))
        (expected_of_x,) = torch.autograd.grad(model(leaf).sum() * 2.0**-10, leaf)
    for mine, theirs in zip(found.values(), expected, strict=True):
        assert error(mine, theirs) < 2.0**-7
    assert error(pulled, expected_of_x) < 2.0**-7


BOUNDS = {"bf16": 2.0**-4, "tf32": 2.0**-8, "fp8-tensor": 0.35, "fp8-delayed": 0.35}


@pytest.mark.parametrize("policy", BOUNDS)
def test_jacobians_forwards_and_backwards_are_those_of_fp64(policy):
    run, model = prepared(policy)
    wide, x, direction = Small().double(), make(1, 4, 32), make(2, 4, 32)
    wide.load_state_dict(run.fp32_state_dict())
    exact = jacrev(wide)(x.double())
    with run.autocast():
        found = {"backwards": jacrev(model)(x), "forwards": jacfwd(model)(x)}
        _, along = jvp(model, (x,), (direction,))
    for way, jacobian in found.items():
        assert error(jacobian, exact) < BOUNDS[policy], way
    assert error(along, jvp(wide, (x.double(),), (direction.double(),))[1]) < BOUNDS[policy]


@pytest.mark.parametrize("policy", ["tf32", "bf16", "fp8-tensor"])
def test_a_hessian_is_that_of_fp64(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
    wide = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32)).double()
    wide.load_state_dict(model.state_dict())
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), policy=policy, emulate=True
    )
    x = make(1, 1, 32)
    exact = hessian(lambda x: wide(x).pow(2).sum())(x.double())
    with run.autocast():
        found = hessian(lambda x: model(x).float().pow(2).sum())(x)
    assert error(found, exact) < BOUNDS[policy]


def test_what_a_transform_saw_leaves_no_trace_in_delayed_scales():
    run, model = prepared("fp8-delayed")
    before = {k: v.clone() for k, v in run.engine.fp8.state_dict().items()}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with run.autocast():
        vmap(grad(loss_of(model)), in_dims=(None, 0))(weights, 100 * make(1, 5, 8, 32))
    after = run.engine.fp8.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
