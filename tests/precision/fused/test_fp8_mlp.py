"""Two fp8 layers and a GELU as one, against the same in float64 and against the plain module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.kernels.launch import interpreted
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fused.fp8_mlp import Fp8Mlp, can_fuse
from narrowcast.precision.plan.policy import PRESETS, Policy
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.swap import restore, swap

DEVICE = "cpu" if interpreted() else "cuda"
POLICIES = {
    "tensor": PRESETS["fp8-tensor"],
    "delayed": PRESETS["fp8-delayed"],
    "e4m3 throughout": Policy(
        forward="e4m3", grad_input="e4m3", grad_weight="e4m3", scaling="tensor"
    ),
}
SHAPES = [(32, 32), (20, 32), (2, 3, 32), (32,)]
pytestmark = pytest.mark.usefixtures("fp8_products")


class Feed(nn.Module):
    fused_mlp = ("up", "gelu", "down")

    def __init__(self, *, up_bias=False, down_bias=True):
        super().__init__()
        self.up = nn.Linear(32, 64, bias=up_bias)
        self.down = nn.Linear(64, 48, bias=down_bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def layered(policy=POLICIES["tensor"], *, kind=Feed, **settings):
    """A module whose layers are in fp8 and nothing else is changed."""
    torch.manual_seed(0)
    module = kind(**settings).to(DEVICE)
    formats = ProductFormats.of(policy)
    whole = AmaxHistories([formats] * 2, torch.device(DEVICE))
    for i, name in enumerate(("up", "down")):
        history = whole.of(i) if policy.scaling == "delayed" else None
        swap(module.get_submodule(name), Fp8Linear, nc_formats=formats, nc_history=history)
    return module


def chained(policy=POLICIES["tensor"], **settings):
    module = layered(policy, **settings)
    assert can_fuse(module)
    swap(module, Fp8Mlp, nc_layers=("up", "down"))
    return module


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def results(module, x, grad, *, wants_x=True):
    """The output and every gradient, by name."""
    given = x.clone().requires_grad_(wants_x)
    output = module(given)
    output.backward(grad.to(output.dtype))
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return {"output": output.detach(), **({"x": given.grad} if wants_x else {}), **found}


def exact(module, x, grad):
    """In float64, by torch alone."""
    plain = Feed(up_bias=module.up.bias is not None, down_bias=module.down.bias is not None)
    plain.to(DEVICE).load_state_dict(module.state_dict())
    return results(plain.double(), x.double(), grad.double())


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("down_bias", [False, True])
def test_output_and_gradients_are_no_further_from_float64_than_those_of_the_two_layers(
    policy, shape, down_bias
):
    fused, apart = (make(policy, down_bias=down_bias) for make in (chained, layered))
    for call in range(2):  # a history needs more than one
        x, grad = drawn(*shape, seed=call), drawn(*shape[:-1], 48, seed=call + 9)
        truth = exact(apart, x, grad)
        mine, theirs = (results(module, x, grad) for module in (fused, apart))
        assert mine.keys() == theirs.keys() == truth.keys()
        for name, value in truth.items():
            assert mine[name].shape == value.shape
            assert mine[name].dtype == theirs[name].dtype
            size = value.norm()
            errors = [(found[name].double() - value).norm() / size for found in (mine, theirs)]
            # The same roundings but one: between the GELU and fp8 there is no bf16. That one is of
            # 2⁻⁹, and where it goes the other way a value moves by a step of fp8; few do.
            assert errors[0] <= 1.25 * errors[1] + 2.0**-9
            # Two products of operands rounded to 2 or 3 bits: four errors of 2⁻³/√12 at most, of
            # all elements and independent, but for a bound that knows nothing of cancellation.
            assert errors[0] <= 4 * 2.0**-3


def test_each_step_moves_the_histories_of_the_chain_as_those_of_the_layers():
    fused, apart = chained(POLICIES["delayed"]), layered(POLICIES["delayed"])
    for call in range(3):
        x, grad = drawn(20, 32, seed=call) * 2.0**call, drawn(20, 48, seed=call + 9)
        for module in (fused, apart):
            results(module, x, grad)
            module.up.nc_history.whole.advance(torch.tensor(True, device=DEVICE))
    mine, theirs = (m.up.nc_history.whole.amax for m in (fused, apart))
    assert (mine[..., :3] > 0).all()
    # What lies between was rounded to bf16 once more in one of them, and fp8 products made of it:
    # a step of e5m2.
    assert ((mine - theirs).abs() <= 2.0**-2 * theirs).all()


FROZEN = [("up",), ("down",), ("up", "down")]


@pytest.mark.parametrize("names", FROZEN)
@pytest.mark.parametrize("wants_x", [False, True])
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_the_same(names, wants_x):
    x, grad = drawn(20, 32), drawn(20, 48, seed=2)
    everything = results(chained(), x, grad)
    part = chained()
    for name in names:
        part.get_submodule(name).requires_grad_(False)
    if len(names) == 2 and not wants_x:
        assert not part(x).requires_grad
        return
    found = results(part, x, grad, wants_x=wants_x)
    frozen = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    left_out = frozen | (set() if wants_x else {"x"})
    assert found.keys() == everything.keys() - left_out
    for name, value in found.items():
        assert torch.equal(value, everything[name])


def test_without_gradients_the_output_is_the_same():
    module, x = chained(), drawn(20, 32)
    with torch.no_grad():
        quiet = module(x)
    assert not quiet.requires_grad
    assert torch.equal(quiet, module(x).detach())


def watch(module, name, kind, seen):
    layer = module.get_submodule(name)
    return {
        "forward": lambda: layer.register_forward_hook(lambda m, i, o: seen.append((i[0], o))),
        "pre": lambda: layer.register_forward_pre_hook(lambda m, i: seen.append((i[0], None))),
        "backward": lambda: layer.register_full_backward_hook(
            lambda m, i, o: seen.append((i[0], o[0]))
        ),
        "backward pre": lambda: layer.register_full_backward_pre_hook(
            lambda m, o: seen.append((None, o[0]))
        ),
    }[kind]()


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "backward pre"])
def test_a_hook_on_a_layer_sees_its_tensors_and_the_numbers_are_those_of_the_two_layers(name, kind):
    x, grad = drawn(20, 32), drawn(20, 48, seed=2)
    fused, apart, seen, expected = chained(), layered(), [], []
    handle = watch(fused, name, kind, seen)
    watch(apart, name, kind, expected)
    mine, theirs = results(fused, x, grad), results(apart, x, grad)
    assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    assert len(seen) == len(expected) == 1
    for a, b in zip(seen[0], expected[0], strict=True):
        assert (a is None) is (b is None)
        assert a is None or torch.equal(a, b)
    handle.remove()
    fused(x)
    assert len(seen) == 1


class Tanh(Feed):
    fused_mlp = ("up", "gelu_tanh", "down")

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 48)


class Misnamed(Feed):
    fused_mlp = ("up", "gelu", "out")


class Doubled(Feed):
    """Inherits the promise, and does not keep it."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_only_a_promise_that_can_be_kept_is_taken_up():
    assert can_fuse(layered())
    assert can_fuse(layered(down_bias=False))
    assert not can_fuse(layered(up_bias=True))
    assert not can_fuse(Feed())
    for kind in (Tanh, Silent, Misnamed):
        assert not can_fuse(layered(kind=kind))


def test_a_promise_does_not_bind_a_subclass_that_computes_something_else():
    assert not can_fuse(layered(kind=Doubled))


@pytest.mark.parametrize(
    "policy",
    [
        Policy(forward="e4m3", grad_input="e5m2", grad_weight="e4m3", scaling="tensor"),
        Policy(forward="e4m3", grad_input="e5m2", grad_weight="bf16", scaling="tensor"),
        Policy(forward="e4m3", grad_input="bf16", grad_weight="bf16", scaling="tensor"),
    ],
    ids=["two fp8", "wide weight", "wide gradients"],
)
def test_gradients_in_more_than_one_format_or_in_a_wide_one_are_not_chained(policy):
    assert not can_fuse(layered(policy))


def test_layers_in_different_formats_are_not_chained():
    module = layered()
    module.down.nc_formats = ProductFormats.of(POLICIES["e4m3 throughout"])
    assert not can_fuse(module)


def test_names_and_values_stay_and_restoring_gives_the_plain_class_back():
    torch.manual_seed(0)
    before = copy.deepcopy(Feed().to(DEVICE).state_dict())
    module = chained()
    module(drawn(16, 32))
    assert isinstance(module, Feed)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())
    restore(module)
    assert type(module) is Feed
    assert type(module.up) is type(module.down) is nn.Linear
    assert not [key for m in module.modules() for key in vars(m) if key.startswith("nc_")]
    x = drawn(16, 32)
    plain = Feed().to(DEVICE)
    plain.load_state_dict(before)
    assert torch.equal(module(x), plain(x))
