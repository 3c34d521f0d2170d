"""Law 8: native fp8 products and emulated ones agree. torch's CPU runs them too, only slowly."""

import copy

import pytest
import torch
from torch import nn

from narrowcast.errors import UnsupportedError
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.modules.wrappers import EmulatedLinear
from narrowcast.precision.plan.policy import PRESETS, Policy
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.swap import swap

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = {
    **{name: PRESETS[name] for name in ("fp8-tensor", "fp8-row", "fp8-delayed")},
    "e4m3 throughout": Policy(
        forward="e4m3", grad_input="e4m3", grad_weight="e4m3", scaling="tensor"
    ),
    "both fp8": Policy(forward="e4m3", grad_input="e5m2", grad_weight="e4m3", scaling="tensor"),
    "both fp8 delayed": Policy(
        forward="e4m3", grad_input="e5m2", grad_weight="e4m3", scaling="delayed"
    ),
    "wide grad_weight": Policy(
        forward="e4m3", grad_input="e5m2", grad_weight="bf16", scaling="tensor"
    ),
    "wide grad_input": Policy(forward="e4m3", grad_input="bf16", grad_weight="e5m2", scaling="row"),
}


def require(device, policy):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    if device == "cpu" and torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13, whose CPU has row-scaled fp8 products")
    if device == "cpu" and "bf16" in (policy.grad_input, policy.grad_weight):
        pytest.skip("needs a GPU: a native bf16 product may kill a process on a CPU")


def pair(policy, device):
    """The same layer, native and emulated."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 32).to(device)
    layers = []
    formats = ProductFormats.of(policy)
    for mixin in (Fp8Linear, EmulatedLinear):
        layer = copy.deepcopy(plain)
        history = None
        if policy.scaling == "delayed":
            history = AmaxHistories([formats], torch.device(device)).of(0)
        swap(layer, mixin, nc_formats=formats, nc_history=history)
        layers.append(layer)
    return layers


def assert_close(native, emulated):
    # The same rounded operands, summed in fp32 in another order, then rounded to bf16 once: now
    # and then to the neighbour.
    native, emulated = native.detach().float(), emulated.detach().float()
    assert (native - emulated).norm() <= 2.0**-8 * emulated.norm()
    assert ((native - emulated).abs() <= 2.0**-6 * emulated.abs().max()).all()


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("shape", [(32, 64), (20, 64), (2, 3, 64), (64,)])
def test_native_and_emulated_products_agree_forward_and_backward(device, policy, shape):
    require(device, policy)
    native, emulated = pair(policy, device)
    generator = torch.Generator(device).manual_seed(1)
    for call in range(3):  # a history needs more than one
        x = torch.randn(*shape, generator=generator, device=device) * 2.0**call
        grad = torch.randn(*shape[:-1], 32, generator=generator, device=device).bfloat16()
        results = []
        for layer in (native, emulated):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            output = layer(given)
            output.backward(grad.to(output.dtype))
            results.append((output, given.grad, layer.weight.grad, layer.bias.grad))
        for a, b in zip(*results, strict=True):
            assert a.shape == b.shape
            assert_close(a, b)
        if native.nc_history is None:
            continue
        for layer in (native, emulated):
            layer.nc_history.whole.advance(torch.tensor(True, device=device))
        assert torch.equal(native.nc_history.amax, emulated.nc_history.amax)
        assert torch.equal(native.nc_history.whole.scale_inv, emulated.nc_history.whole.scale_inv)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_is_not_hidden_by_the_cast(device):
    policy = PRESETS["fp8-tensor"]
    require(device, policy)
    native, _ = pair(policy, device)
    x = torch.randn(16, 64, device=device)
    x[3, 5] = float("inf")
    assert not native(x)[3].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_leaves_the_native_history_alone(device):
    policy = PRESETS["fp8-delayed"]
    require(device, policy)
    native, _ = pair(policy, device)
    with torch.no_grad():
        native(torch.randn(16, 64, device=device))
    native.nc_history.whole.advance(torch.tensor(True, device=device))
    assert not native.nc_history.amax[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-row", "fp8-delayed"])
def test_a_gradient_penalty_through_a_native_layer_is_that_of_an_emulated_one(device, name):
    require(device, PRESETS[name])
    found = []
    for layer in pair(PRESETS[name], device):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(device)
        x.requires_grad_()
        out = layer(x).float().pow(2).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (slope.float().norm(dim=1) - 1).pow(2).mean().backward(inputs=[layer.bias])
        out = layer(x).float().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (grad,) = torch.autograd.grad(slope.float().pow(2).sum(), layer.weight)
        found.append((layer.bias.grad, grad))
    for native, emulated in zip(*found, strict=True):
        assert (native - emulated).norm() <= 2.0**-6 * emulated.norm()


def test_the_gradient_of_a_native_weight_is_not_differentiated_in_silence():
    require("cpu", PRESETS["fp8-tensor"])
    layer, _ = pair(PRESETS["fp8-tensor"], "cpu")
    x = torch.randn(16, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).float().pow(2).sum(), layer.weight, create_graph=True)
    with pytest.raises(UnsupportedError, match="Use bf16 for this layer"):
        grad.pow(2).sum().backward()


def test_a_native_layer_has_gradients_of_each_sample():
    require("cpu", PRESETS["fp8-tensor"])
    layer, _ = pair(PRESETS["fp8-tensor"], "cpu")
    x = torch.randn(4, 16, 64)

    def loss(weight, x):
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).float().pow(2).mean()

    weight = layer.weight.detach()
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    for found, sample in zip(each, x, strict=True):
        (alone,) = torch.autograd.grad(layer(sample).float().pow(2).mean(), layer.weight)
        assert_close(found, alone)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_of_rows_that_fill_no_tile_may_be_written_in_place(device):
    """Seven rows are padded to sixteen for the product; models mask what a layer returns."""
    policy = POLICIES["fp8-tensor"]
    require(device, policy)
    native, _ = pair(policy, device)
    output = native(torch.randn(7, 64, device=device))
    output[torch.arange(7, device=device) % 2 == 0] = 0.0
    assert output.shape == (7, 32)
    output.float().sum().backward()
    bias = native.bias.grad
    assert torch.equal(bias, torch.full_like(bias, 3.0))  # the rows that were left
