"""The one table of roles and formats, against the casts that a module makes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.numerics import format_named, plain_format, quantize, round_blocks, round_to
from narrowcast.numerics.formats import BlockFormat
from narrowcast.precision.plan.module_plan import roundings
from narrowcast.precision.products.operands import needs_scale

ROWS, IN, OUT = 16, 32, 64
POLICIES = [
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "bf16, params=bf16, master=split",
    "bf16, params=bf16, master=fp32, grads=fp32",
    "fp16, grad_weight=fp32",
    "bf16, grad_input=fp32",
    "bf16, output=fp32",
    "fp8-tensor",
    "fp8-delayed",
    "fp8-row",
    "fp8-delayed, params=bf16, master=split",
    "compute=mxfp8",
]


class Products(TorchDispatchMode):
    """Keeps the operands and the result of every matrix product, by its shape."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            key = (*left.shape, right.shape[1])
            # What a product returns may be rounded in place.
            self.seen[key] = left.clone(), right.clone(), found.clone()
        return found


def cast(x, name, *, scaling):
    """Return a matrix whose rows are summed as an operand of a format, by other code's rounding."""
    target = format_named(name)
    if isinstance(target, BlockFormat):
        return round_blocks(x, target)
    if needs_scale(name):
        return quantize(x, target, per="row" if scaling == "row" else "tensor")
    return x if name == "fp32" else round_to(x, target)


def observed(text):
    """Run a layer once; return its policy, what it was given, its products and what it returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    policy = nc.policy(text)
    # A scale that leaves fp16 in range: what is looked at is rounding.
    scale = nc.LossScale(init_scale=8.0) if policy.needs_loss_scale else None
    run = nc.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        policy=policy,
        loss_scale=scale,
        emulate=None if text == "fp32" else True,
    )
    x = torch.randn(ROWS, IN, requires_grad=True)
    grad_output = torch.randn(ROWS, OUT)
    products = Products()
    with products:
        with run.autocast():
            output = model(x)
        run.backward((output.float() * grad_output).sum())
    given = x.detach(), grad_output * (1.0 if scale is None else scale.init_scale)
    return run.plan.modules[0].policy, given, products.seen, output.detach(), model[0].weight


@pytest.mark.parametrize("text", POLICIES)
def test_every_role_is_rounded_to_the_formats_of_the_table_in_their_order(text):
    policy, (x, grad_output), seen, output, weight = observed(text)
    forward, backward = seen[ROWS, IN, OUT], seen[ROWS, OUT, IN]

    def after(role, value):
        for name in roundings(policy, role):
            value = cast(value, name, scaling=policy.scaling)
        return value

    assert torch.equal(forward[0].float(), after("input", x))
    assert torch.equal(forward[1].t().float(), after("weight", weight.detach().float()))
    assert torch.equal(output.float(), after("output", forward[2].float()))
    assert torch.equal(backward[0].float(), after("grad_output", grad_output))
    product = seen[OUT, ROWS, IN] if (OUT, ROWS, IN) in seen else seen[IN, ROWS, OUT]
    made = product[2] if product[2].shape == weight.shape else product[2].t()
    assert torch.equal(weight.grad.float(), after("grad_weight", made.float()))
    assert weight.grad.dtype == plain_format(roundings(policy, "grad_weight")[-1]).dtype
    assert weight.dtype == plain_format(roundings(policy, "update")[-1]).dtype


@pytest.mark.parametrize(
    ("kind", "expected"), [("embedding", "bf16"), ("normalisation", "fp32"), ("linear", "e4m3")]
)
def test_a_module_without_products_has_the_format_it_computes_in(kind, expected):
    policy = nc.policy("fp8-tensor, params=bf16, master=split")
    assert roundings(policy, "input", kind=kind) == (expected,)
