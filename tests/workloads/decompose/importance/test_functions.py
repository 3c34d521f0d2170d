"""Importance functions, against loops over seeds and components in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.importance.functions import build_importance

SEEDS, ROWS = 2, 6
SITES = [
    Site("first", "linear", d_in=3, d_out=4, components=5, bias=True),
    Site("second", "linear", d_in=4, d_out=2, components=2, bias=False),
]
SHAPES = {"width": 8, "blocks": 2, "heads": 2}


def given(sites=SITES, dtype=torch.float64):
    inputs = [torch.randn(SEEDS, ROWS, site.d_in, dtype=dtype) for site in sites]
    acts = [torch.randn(SEEDS, ROWS, site.components, dtype=dtype) for site in sites]
    return inputs, acts


def built(kind, hidden):
    shape = SHAPES if kind == "global_transformer" else {}
    function = build_importance(kind, SITES, seeds=SEEDS, hidden=hidden, **shape).double()
    with torch.no_grad():
        for name, parameter in function.named_parameters():
            if "bias" in name:  # zero at first, and so no test of anything
                parameter.normal_()
    return function


def component_mlp(mlp, x, seed, c):
    """One component's MLP on rows of its own vector, (rows, fan)."""
    hidden = mlp.first_bias.shape[-1]
    if mlp.shares:
        weight = mlp.first[seed, :, c * hidden : (c + 1) * hidden]
    else:
        weight = mlp.first[seed, c][None]
    x = F.gelu(F.linear(x, weight.T, mlp.first_bias[seed, c]))
    for weight, bias in zip(mlp.middle, mlp.middle_biases, strict=True):
        x = F.gelu(F.linear(x, weight[seed, c].T, bias[seed, c]))
    return F.linear(x, mlp.last[seed, c][None], mlp.last_bias[seed, c])[:, 0]


@pytest.mark.parametrize("hidden", [[4], [4, 3]])
@pytest.mark.parametrize("kind", ["mlp", "vector_mlp"])
def test_every_component_has_an_mlp_of_its_own(kind, hidden):
    function, (inputs, acts) = built(kind, hidden), given()
    logits = function(inputs, acts, length=1)
    for mlp, x, h, found in zip(function.functions, inputs, acts, logits, strict=True):
        for seed in range(SEEDS):
            for c in range(found.shape[-1]):
                own = h[seed, :, c, None] if kind == "mlp" else x[seed]
                expected = component_mlp(mlp, own, seed, c)
                torch.testing.assert_close(found[seed, :, c], expected, rtol=1e-12, atol=1e-12)


def dense(layer, x, seed):
    return F.linear(x, layer.weight[seed].T, layer.bias[seed, 0])


def shared_mlp(mlp, x, seed):
    for layer in mlp.layers:
        x = F.gelu(dense(layer, x, seed))
    return dense(mlp.last, x, seed)


@pytest.mark.parametrize("hidden", [[7], [7, 4]])
def test_a_shared_mlp_tells_all_components_of_a_site(hidden):
    function, (inputs, acts) = built("shared_mlp", hidden), given()
    logits = function(inputs, acts, length=1)
    for mlp, x, found in zip(function.functions, inputs, logits, strict=True):
        for seed in range(SEEDS):
            torch.testing.assert_close(found[seed], shared_mlp(mlp, x[seed], seed))


def test_a_global_shared_mlp_sees_the_inputs_of_all_sites():
    function, (inputs, acts) = built("global_shared_mlp", [7]), given()
    first, second = function(inputs, acts, length=1)
    for seed in range(SEEDS):
        both = shared_mlp(function.function, torch.cat([x[seed] for x in inputs], -1), seed)
        torch.testing.assert_close(torch.cat([first[seed], second[seed]], -1), both)


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def rotate(x):
    """Rotary positions by complex numbers, (length, head width)."""
    half = x.shape[1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * speeds
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles.double())
    return torch.cat((turned.real, turned.imag), -1)


def transformer(network, inputs, seed):
    """One text through the transformer, head by head."""
    x = dense(network.embed, torch.cat([rms(each) for each in inputs], -1), seed)
    width = x.shape[-1]
    for block in network.blocks:
        query, key, value = dense(block.qkv, rms(x), seed).split(width, -1)
        found = []
        for head in range(SHAPES["heads"]):
            own = slice(head * block.head_width, (head + 1) * block.head_width)
            scores = rotate(query[:, own]) @ rotate(key[:, own]).T / block.head_width**0.5
            found.append(scores.softmax(-1) @ value[:, own])
        x = x + dense(block.out, torch.cat(found, -1), seed)
        x = x + dense(block.down, F.gelu(dense(block.up, rms(x), seed)), seed)
    return dense(network.last, x, seed)


def test_a_global_transformer_lets_the_positions_of_a_text_see_one_another():
    function, (inputs, acts) = built("global_transformer", [16]), given()
    found = torch.cat(function(inputs, acts, length=3), -1)
    for seed in range(SEEDS):
        for text in (slice(0, 3), slice(3, 6)):
            expected = transformer(function.function, [x[seed, text] for x in inputs], seed)
            # The angles of rotary positions are fp32, whatever the weights are.
            torch.testing.assert_close(found[seed, text], expected, rtol=1e-5, atol=1e-5)


KINDS = ["mlp", "vector_mlp", "shared_mlp", "global_shared_mlp", "global_transformer"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_seed_is_given_changes_nothing_for_another(kind):
    function, (inputs, acts) = built(kind, [4]), given()

    def gradients():
        function.zero_grad()
        logits = function(inputs, acts, length=3)
        sum(each.square().sum() for each in logits).backward()
        seeds = [[p.grad[seed].clone() for p in function.parameters()] for seed in range(SEEDS)]
        return logits[0][1], seeds

    before, (changed_before, kept_before) = gradients()
    for each in (*inputs, *acts):
        each[0] += 1
    after, (changed_after, kept_after) = gradients()
    assert torch.equal(before, after)
    assert all(map(torch.equal, kept_before, kept_after))
    assert not all(map(torch.equal, changed_before, changed_after))


def test_a_global_transformer_has_gradients_of_samples_that_are_zero():
    shape = {"width": 64, "blocks": 8, "heads": 4}
    function = build_importance("global_transformer", SITES, seeds=1, hidden=[64], **shape)
    inputs = [torch.zeros(1, ROWS, site.d_in) for site in SITES]
    sum(each.sum() for each in function(inputs, [], length=1)).backward()
    assert all(p.grad.abs().max() < 1e4 for p in function.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_biases_begin_at_zero_and_weights_at_the_scale_of_their_fan(kind):
    torch.manual_seed(0)
    wide = [Site("wide", "linear", d_in=256, d_out=4, components=64, bias=True)]
    shape = {"width": 64, "blocks": 1, "heads": 2} if kind == "global_transformer" else {}
    function = build_importance(kind, wide, seeds=1, hidden=[32], **shape)
    parameters = dict(function.named_parameters())
    biases = {name: p for name, p in parameters.items() if "bias" in name}
    biases.pop("function.embed.bias", None)  # what a stream begins with where all inputs are 0
    assert all(not p.any() for p in biases.values())
    last = next(p for name, p in parameters.items() if name.endswith(("last", "last.weight")))
    fan = shape.get("width", 32)
    assert last.std().item() == pytest.approx(fan**-0.5, rel=0.1)


def test_an_embedding_is_refused_where_its_input_would_have_to_be_a_vector():
    tokens = [Site("wte", "embedding", d_in=100, d_out=8, components=4, bias=False)]
    assert build_importance("mlp", tokens, seeds=1, hidden=[4]).needs == "acts"
    with pytest.raises(ConfigError, match=r"wte is an embedding.* Write importance\.kind=mlp"):
        build_importance("vector_mlp", tokens, seeds=1, hidden=[4])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("global_transformer", {"hidden": [4, 4]}, "needs one hidden width"),
        (
            "global_transformer",
            {"hidden": [4], "width": 30, "blocks": 1, "heads": 4},
            "Write importance.width=24",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_importance(kind, SITES, seeds=1, **settings)
