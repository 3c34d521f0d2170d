"""fp32 islands, nested autocast and custom autograd functions mean what they do in torch's AMP."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("guarded")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_grid(x, dtype):
    return torch.equal(x.float(), x.to(dtype).float())


class Rotary(nn.Module):
    """Angles of positions up to 512 in an island, as Llama has them, and a layer outside it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(16) / 16))
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        positions = torch.arange(x.shape[-2], dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            angles = torch.einsum("i,j->ij", positions, self.frequencies)
        turned = torch.cat([x[..., :16] * angles.cos(), x[..., 16:] * angles.sin()], -1)
        return self.layer(turned), angles


def prepared(model, policy, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if policy == "fp16":
        settings["loss_scale"] = nc.LossScale(init_scale=8.0)
    return nc.prepare(model, optimizer, policy=policy, emulate=True, **settings)


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-tensor", "bf16, params=bf16"])
def test_angles_of_an_island_have_all_digits_and_the_layer_outside_is_rounded(policy):
    torch.manual_seed(0)
    model, x = Rotary(), make(0, 512, 32)
    run = prepared(model, policy)
    with run.autocast():
        output, angles = model(x)
    assert torch.equal(angles, torch.outer(torch.arange(512.0), model.frequencies))
    assert on_grid(output, DTYPES.get(policy, torch.bfloat16))


def test_code_that_asks_hears_the_truth():
    run = prepared(nn.Linear(8, 8), "fp16")
    with run.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_another_16_bit_format_nested_in_a_region_is_emulated():
    run = prepared(nn.Linear(8, 8), "bf16")
    a = make(0, 8, 8)
    with run.autocast():
        with torch.autocast("cpu", dtype=torch.float16):
            inside = a @ a, F.linear(a, a)
        outside = a @ a
    assert all(on_grid(x, torch.float16) and not on_grid(x, torch.bfloat16) for x in inside)
    assert on_grid(outside, torch.bfloat16)


ISLANDERS = {
    "linear": lambda a: F.linear(a, a),
    "einsum": lambda a: torch.einsum("ij,jk->ik", a, a),
    "conv": lambda a: F.conv1d(a[None], a[:, :, None]),
    "sdpa": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]),
    "bilinear": lambda a: F.bilinear(a, a, a[None].expand(8, 8, 8)),
    "addmm_": lambda a: a.clone().addmm_(a, a),
    "lstm": lambda a: nn.LSTM(8, 8, dtype=a.dtype)(a[None])[0],
    "attention": lambda a: nn.MultiheadAttention(8, 2, dtype=a.dtype)(a, a, a)[0],
    "prelu": lambda a: F.prelu(a, a[0, :1]),
    "covariance": lambda a: torch.cov(a),
    "softmax": lambda a: torch.softmax(a, -1),
}


@pytest.mark.parametrize("function", ISLANDERS.values(), ids=ISLANDERS)
@pytest.mark.parametrize("where", ["outside", "island"])
def test_no_native_product_is_asked_for_in_a_region_or_on_an_island(function, where):
    run = prepared(nn.Linear(8, 8), "bf16")
    a = make(0, 8, 8)
    for dtype in (torch.float32, torch.bfloat16) if where == "island" else (torch.float32,):
        leaf = a.to(dtype).requires_grad_()
        torch.manual_seed(0)
        with run.autocast(), torch.autocast("cpu", enabled=where == "outside"):
            result = function(leaf)
            loss = result.float().pow(2).sum()
            (inside,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (outside,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(inside, outside)
        if where == "island":
            assert result.dtype == dtype
        if where == "island" and dtype == torch.float32:
            torch.manual_seed(0)
            assert torch.equal(result, function(leaf))


def test_a_layer_in_fp8_is_fp32_on_an_island():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                inside = self.a(x)
            return inside, self.b(x)

    torch.manual_seed(0)
    model, x = Model(), make(0, 4, 32)
    exact = model(x)
    run = prepared(model, "fp8-tensor")
    with run.autocast():
        inside, outside = model(x)
    assert torch.equal(inside, exact[0])
    assert not torch.equal(outside, exact[1])


class Scaled(torch.autograd.Function):
    """What users decorate: x · w, with a backward pass of their own."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class ScaledInFp32(Scaled):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight


class ByFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(make(5, 32, 32)), function

    def forward(self, x):
        return self.function.apply(x, self.weight)


@pytest.mark.parametrize("by", ["run", "loss.backward", "torch.autograd.backward", "grad"])
def test_custom_functions_are_in_the_format_both_ways_or_in_fp32_both_ways(by):
    x = make(0, 8, 32).requires_grad_()
    for function, rounded in ((Scaled, True), (ScaledInFp32, False)):
        x.grad, model = None, ByFunction(function)
        run = prepared(model, "bf16")
        with run.autocast():
            output = model(x)
            loss = output.pow(2).sum()
            if by == "grad":
                (x.grad,) = torch.autograd.grad(loss, x)
            elif by != "run":
                loss.backward() if by == "loss.backward" else torch.autograd.backward([loss])
        if by == "run":
            run.backward(loss)
        assert on_grid(output, torch.bfloat16) == rounded
        assert on_grid(x.grad, torch.bfloat16) == rounded
        if not rounded:
            expected = (2 * (x @ model.weight)) @ model.weight.t()
            assert torch.equal(x.grad, expected)


class Reversible(torch.autograd.Function):
    """Runs a layer again in a backward pass of its own, as adjoints and reversible layers do."""

    @staticmethod
    def forward(ctx, x, layer, again, *weights):
        ctx.save_for_backward(x)
        ctx.layer, ctx.again, ctx.weights = layer, again, weights
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        ctx.again.append(output.detach())
        first, *others = torch.autograd.grad(output, (x, *ctx.weights), grad.to(output.dtype))
        return first, None, None, *others


@pytest.mark.parametrize(
    "policy", ["bf16", "fp16", "bf16, params=bf16, master=split", "fp16, params=fp16", "fp8-tensor"]
)
@pytest.mark.parametrize("where", ["outside", "inside", "with autocast off"])
def test_a_layer_is_in_its_policy_in_a_backward_pass_of_ones_own_too(policy, where):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.again = nn.Linear(32, 32), []

        def forward(self, x):
            return Reversible.apply(x, self.layer, self.again, *self.layer.parameters())

    torch.manual_seed(0)
    model, x = Model(), make(0, 8, 32).requires_grad_()
    run = prepared(model, policy)
    with run.autocast():
        output = model(x)
        loss = output.float().pow(2).mean()
        if where == "inside":
            run.backward(loss)
    with torch.autocast("cpu", enabled=False) if "off" in where else contextlib.nullcontext():
        outcome = run.step(None if where == "inside" else loss)
    assert outcome.applied
    assert torch.equal(model.again[0], output)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-tensor"])
def test_a_pass_that_is_run_again_has_the_islands_of_the_first(policy, reentrant):
    def trained(wrap):
        torch.manual_seed(0)
        model, x = Rotary(), make(0, 64, 32).requires_grad_()
        run = prepared(model, policy)
        with run.autocast():
            loss = wrap(lambda x: model(x)[0], x).pow(2).mean()
        run.step(loss)
        return x.grad, *model.parameters()

    plain = trained(lambda function, x: function(x))
    again = trained(lambda function, x: checkpoint(function, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again))


def test_a_backward_pass_that_no_region_sees_is_refused():
    run = prepared(nn.Linear(8, 8), "bf16")
    a = make(0, 8, 8).requires_grad_()
    with run.autocast():
        loss = (a @ a).sum()
        with pytest.raises(UnsupportedError, match=r"Call loss\.backward\(\) instead"):
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones(()))


def test_a_module_in_another_format_is_fp32_on_an_island():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.other = nn.Sequential(nn.Linear(16, 16))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.other(x)

    model, x = Model(), make(0, 4, 16)
    exact = model(x)
    run = prepared(model, "bf16; other*: fp16")
    with run.autocast():
        assert torch.equal(model(x), exact)


def test_backward_passes_inside_a_region_take_all_that_torch_takes():
    run = prepared(nn.Linear(8, 8), "bf16")
    a, b = make(0, 8, 8).requires_grad_(), make(1, 8, 8).requires_grad_()
    with run.autocast():
        product = a @ b
        product.backward(torch.ones(8, 8), retain_graph=True, inputs=[a])
        assert b.grad is None
        torch.autograd.backward([product.sum(), product.sum()], [None, None], inputs=b)
        (again,) = torch.autograd.grad((a @ b).sum(), [a], materialize_grads=True)
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (a @ b).backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(a.detach().sum(), a)
    assert torch.equal(a.grad, again)
    assert torch.equal(
        b.grad, 2 * (a.bfloat16().float().sum(0)[:, None].bfloat16().float().expand(8, 8))
    )
