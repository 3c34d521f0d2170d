"""Three fp8 layers and a gated activation as one, against float64 and against the plain module."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import narrowcast as nc
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fused.fp8_gated_mlp import Fp8GatedMlp, can_chain
from narrowcast.precision.plan.known_modules import GatedMlp
from narrowcast.precision.plan.policy import PRESETS, Policy
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.swap import swap

DEVICE = "cpu" if interpreted() else "cuda"
POLICIES = {
    "tensor": PRESETS["fp8-tensor"],
    "delayed": PRESETS["fp8-delayed"],
    "e4m3 throughout": Policy(
        forward="e4m3", grad_input="e4m3", grad_weight="e4m3", scaling="tensor"
    ),
}
SHAPES = [(32, 32), (20, 32), (2, 3, 32), (32,)]
ACTIVATIONS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
}
LAYERS = ("gate_proj", "up_proj", "down_proj")
pytestmark = pytest.mark.usefixtures("fp8_products")


class Gated(nn.Module):
    def __init__(self, *, activation="silu", bias=False, down_bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 64, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(64, 48, bias=down_bias)
        self.act_fn = ACTIVATIONS[activation]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def known(activation):
    return GatedMlp(*LAYERS, activation, "act_fn")


def layered(policy=POLICIES["tensor"], **settings):
    """A module whose layers are in fp8 and nothing else is changed."""
    torch.manual_seed(0)
    module = Gated(**settings).to(DEVICE)
    formats = ProductFormats.of(policy)
    whole = AmaxHistories([formats] * 3, torch.device(DEVICE))
    for i, name in enumerate(LAYERS):
        history = whole.of(i) if policy.scaling == "delayed" else None
        swap(module.get_submodule(name), Fp8Linear, nc_formats=formats, nc_history=history)
    return module


def chained(policy=POLICIES["tensor"], *, activation="silu", **settings):
    module = layered(policy, activation=activation, **settings)
    assert can_chain(module, known(activation))
    swap(module, Fp8GatedMlp, nc_chain=known(activation))
    return module


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def results(module, x, grad):
    """The output and every gradient, by name."""
    given = x.clone().requires_grad_()
    output = module(given)
    output.backward(grad.to(output.dtype))
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return {"output": output.detach(), "x": given.grad, **found}


def exact(module, x, grad, **settings):
    """In float64, by torch alone."""
    plain = Gated(**settings).to(DEVICE)
    plain.load_state_dict(module.state_dict())
    return results(plain.double(), x.double(), grad.double())


def errors(found, expected):
    return {
        name: float((found[name].double() - value).norm() / value.norm())
        for name, value in expected.items()
    }


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_gradients_are_no_further_from_float64_than_those_of_the_layers(
    policy, shape, activation
):
    settings = {"activation": activation, "down_bias": shape == (20, 32)}
    fused, apart = (make(policy, **settings) for make in (chained, layered))
    for call in range(2):  # the second with scales from the first, where they are delayed
        x, grad = drawn(*shape, seed=call), drawn(*shape[:-1], 48, seed=5 + call)
        expected = exact(fused, x, grad, **settings)
        mine, theirs = (errors(results(each, x, grad), expected) for each in (fused, apart))
        assert mine.keys() == theirs.keys()
        for name, error in mine.items():
            # One rounding to 16 bits less; of few values, another one may be nearer.
            assert error <= 1.25 * theirs[name] + 2.0**-8, name
        for each in (fused, apart):
            if each.gate_proj.nc_history is not None:
                each.gate_proj.nc_history.whole.advance(torch.tensor(True, device=DEVICE))


def test_what_is_remembered_is_what_the_layers_would_remember():
    fused, apart = (make(POLICIES["delayed"]) for make in (chained, layered))
    for step in range(3):
        x, grad = drawn(32, 32, seed=step), drawn(32, 48, seed=9 + step)
        for each in (fused, apart):
            results(each, x, grad)
            each.gate_proj.nc_history.whole.advance(torch.tensor(True, device=DEVICE))
    mine, theirs = (each.gate_proj.nc_history.whole for each in (fused, apart))
    assert (mine.amax[..., :3] > 0).all()
    # Between the layers, what was rounded to bf16 is not any more.
    torch.testing.assert_close(mine.amax, theirs.amax, rtol=2.0**-4, atol=0)
    assert torch.equal(mine.amax[0, 0], theirs.amax[0, 0])
    assert torch.equal(mine.amax[1, 0], theirs.amax[1, 0])


@pytest.mark.parametrize("frozen", [*LAYERS, "all"])
def test_frozen_weights_have_no_gradient_and_the_others_theirs(frozen):
    fused, whole = chained(), chained()
    names = LAYERS if frozen == "all" else (frozen,)
    for name in names:
        fused.get_submodule(name).requires_grad_(False)
    x, grad = drawn(32, 32), drawn(32, 48)
    found, expected = results(fused, x, grad), results(whole, x, grad)
    assert set(expected) - set(found) == {f"{name}.weight" for name in names}
    for name, value in found.items():
        assert torch.equal(value, expected[name])


def test_evaluation_gives_the_output_of_training():
    module, x = chained(), drawn(32, 32)
    with torch.no_grad():
        found = module(x)
    assert torch.equal(found, module(x))


@pytest.mark.parametrize("layer", [*LAYERS, "act_fn"])
def test_who_watches_what_is_inside_sees_it(layer):
    seen = []
    module = chained()
    module.act_fn = nn.SiLU()
    module.get_submodule(layer).register_forward_hook(lambda *_: seen.append(layer))
    expected = layered()(drawn(32, 32))
    found = module(drawn(32, 32))
    assert seen == [layer]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "policy",
    [
        PRESETS["fp8-row"],
        Policy(forward="e4m3", grad_input="e5m2", grad_weight="bf16", scaling="tensor"),
        Policy(forward="e4m3", grad_input="e5m2", grad_weight="e4m3", scaling="tensor"),
    ],
)
def test_products_of_other_kinds_are_not_joined(policy):
    assert not can_chain(layered(policy), known("silu"))


def test_a_bias_before_the_activation_is_not_joined_and_one_after_it_is():
    assert not can_chain(layered(bias=True), known("silu"))
    assert can_chain(layered(down_bias=True), known("silu"))


def test_one_layer_for_gate_and_value_is_not_joined():
    assert not can_chain(layered(), GatedMlp("up_proj", "up_proj", "down_proj", "silu", "act_fn"))


@pytest.mark.parametrize("policy", ["tensor", "delayed"])
def test_a_compiled_chain_gives_what_the_eager_one_does(policy):
    eager, module = (chained(POLICIES[policy]) for _ in range(2))
    x, grad = drawn(32, 32), drawn(32, 48)
    expected = results(eager, x, grad)
    for name in LAYERS:
        module.get_submodule(name).nc_refresh()
    torch._dynamo.reset()
    given = x.clone().requires_grad_()
    output = torch.compile(module, backend="aot_eager", fullgraph=True)(given)
    output.backward(grad.to(output.dtype))
    torch._dynamo.reset()
    assert torch.equal(output, expected["output"])
    assert torch.equal(given.grad, expected["x"])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
@pytest.mark.parametrize("policy", ["fp8-delayed", "fp8-tensor"])
def test_language_models_learn_as_they_do_in_bf16(language_model, family, policy, cuda):
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 97, (8, 64), generator=generator).to(cuda)
    losses = {}
    for each in ("bf16", policy):
        model = language_model(family, **wide).to(cuda)
        # As small as this, no layer would gain by fp8.
        plan = nc.plan(model, each, hardware=nc.detect_hardware("cuda"), skip_slow_fp8=False)
        run = nc.prepare(model, SGD(model.parameters(), 0.05), policy=plan)
        if each == policy:
            assert sum(isinstance(m, Fp8GatedMlp) for m in model.modules()) == 2
            shared = [m.nc_history for m in model.modules() if isinstance(m, Fp8Linear)]
            assert policy == "fp8-tensor" or shared[0].whole.reads_by_name[:3] == [0, 0, 0]
        for _ in range(10):
            with run.autocast():
                loss = model(tokens, labels=tokens).loss
            run.step(loss)
        losses[each] = float(loss.detach())
    assert losses[policy] == pytest.approx(losses["bf16"], rel=0.1)
