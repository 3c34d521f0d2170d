"""Our multi-head attention against torch's, for every argument torch's takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.numerics import BF16, FP32
from narrowcast.precision.products.attention import multi_head_attention
from narrowcast.precision.products.modes import EmulatedProducts

BATCH, TARGET, SOURCE, WIDTH, HEADS = 3, 5, 5, 16, 4
# Some sums of up to 16 fp32 terms in another order, through a softmax: a few last digits.
CLOSE = {"rtol": 2.0**-16, "atol": 2.0**-18}


def make(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module(**arguments):
    torch.manual_seed(0)
    built = nn.MultiheadAttention(WIDTH, HEADS, **arguments)
    # torch begins biases at zero, where a forgotten one would not show.
    for name, parameter in built.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return built


def both(built, *inputs, **arguments):
    """Return outputs and gradients of torch's own computation, and of ours through the module."""
    results = []
    for emulated in (False, True):
        given = [x.detach().clone().requires_grad_() for x in inputs]
        built.zero_grad()
        if emulated:
            with EmulatedProducts(FP32):
                output, weights = built(*given, **arguments)
        else:
            output, weights = built(*given, **arguments)
        output.square().sum().backward()
        gradients = [x.grad for x in given] + [p.grad for p in built.parameters()]
        results.append((output, weights, *gradients))
    return results


def assert_same(results):
    torchs, ours = results
    for a, b in zip(torchs, ours, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, **CLOSE)


MODULES = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"kdim": 7, "vdim": 9},
    {"kdim": 7, "vdim": 9, "add_bias_kv": True},
]


@pytest.mark.parametrize("arguments", MODULES, ids=lambda a: ",".join(a) or "plain")
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_attention_equals_torchs_for_every_kind_of_module(arguments, need_weights):
    widths = (WIDTH, arguments.get("kdim", WIDTH), arguments.get("vdim", WIDTH))
    shapes = [(SOURCE, BATCH, w) for w in widths]
    if arguments.get("batch_first"):
        shapes = [(b, t, w) for t, b, w in shapes]
    inputs = [make(i, *shape) for i, shape in enumerate(shapes)]
    assert_same(both(module(**arguments), *inputs, need_weights=need_weights))


def causal_bool(rows=TARGET):
    return torch.ones(rows, SOURCE, dtype=torch.bool).triu(1)


MASKS = {
    "none": {},
    "bool 2-D": {"attn_mask": causal_bool()},
    "float 2-D": {"attn_mask": make(5, TARGET, SOURCE)},
    "float with -inf": {"attn_mask": torch.zeros(TARGET, SOURCE).masked_fill(causal_bool(), -1e30)},
    "bool 3-D": {"attn_mask": make(6, BATCH * HEADS, TARGET, SOURCE) > 1.0},
    "float 3-D": {"attn_mask": make(7, BATCH * HEADS, TARGET, SOURCE)},
    "causal": {"attn_mask": causal_bool(), "is_causal": True},
}
PADDINGS = {
    "none": {},
    "bool": {"key_padding_mask": torch.tensor([[False] * 4 + [True]] * BATCH)},
    "float": {"key_padding_mask": make(8, BATCH, SOURCE)},
}


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=[f"padding {p}" for p in PADDINGS])
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_masks_of_every_kind_mean_what_they_mean_to_torch(mask, padding, added):
    inputs = [make(i, TARGET, BATCH, WIDTH) for i in range(3)]
    # Where torch trusts the hint, it hides the added keys that its own mask shows: it contradicts
    # itself, and there is nothing to equal.
    contradicts = "is_causal" in mask and added and not padding
    for need_weights in (True,) if contradicts else (True, False):
        assert_same(both(module(**added), *inputs, **mask, **padding, need_weights=need_weights))


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_averaged_over_heads_or_not(average):
    inputs = [make(i, TARGET, BATCH, WIDTH) for i in range(3)]
    results = both(module(), *inputs, average_attn_weights=average)
    assert_same(results)
    heads = () if average else (HEADS,)
    assert results[1][1].shape == (BATCH, *heads, TARGET, SOURCE)


@pytest.mark.parametrize("mask", [None, causal_bool()], ids=["no mask", "mask"])
@pytest.mark.parametrize("average", [True, False])
def test_a_sequence_without_a_batch_dimension_is_attended_as_torch_does(average, mask):
    inputs = [make(i, TARGET, WIDTH) for i in range(3)]
    padding = torch.tensor([False, False, False, False, True])
    results = both(
        module(),
        *inputs,
        attn_mask=mask,
        key_padding_mask=padding,
        average_attn_weights=average,
    )
    assert_same(results)


def test_target_and_source_may_differ_in_length():
    inputs = [
        make(0, 2, BATCH, WIDTH),
        make(1, SOURCE, BATCH, WIDTH),
        make(2, SOURCE, BATCH, WIDTH),
    ]
    assert_same(both(module(), *inputs))


def test_torch_is_the_same_for_a_hint_without_a_mask():
    """torch refuses `is_causal` without a mask; the function itself computes one of its own."""
    built = module()
    x = make(0, TARGET, BATCH, WIDTH)
    arguments = (
        x, x, x, WIDTH, HEADS, built.in_proj_weight, built.in_proj_bias, None, None, False, 0.0,
        built.out_proj.weight, built.out_proj.bias,
    )  # fmt: skip
    hinted, _ = multi_head_attention(*arguments, is_causal=True, need_weights=False)
    masked, _ = F.multi_head_attention_forward(
        *arguments, attn_mask=causal_bool(), need_weights=False
    )
    torch.testing.assert_close(hinted, masked, **CLOSE)


def test_dropout_drops_as_much_as_torchs_and_only_in_training():
    built = module(dropout=0.5)
    x = make(0, 64, 8, WIDTH)
    with EmulatedProducts(FP32):
        _, weights = built(x, x, x, average_attn_weights=False)
        built.eval()
        _, whole = built(x, x, x, average_attn_weights=False)
    dropped = (weights == 0).float().mean()
    # 8 · 4 · 64 · 64 coins: five standard deviations.
    assert abs(dropped - 0.5) < 5 * 0.5 / weights.numel() ** 0.5
    assert not (whole == 0).any()


@pytest.mark.parametrize("add_zero_attn", [False, True])
@pytest.mark.parametrize("given", [("static_k",), ("static_v",), ("static_k", "static_v")])
def test_static_keys_and_values_take_the_place_of_projected_ones_as_in_torch(given, add_zero_attn):
    x = make(0, TARGET, BATCH, WIDTH)
    statics = {name: make(i, BATCH * HEADS, SOURCE, WIDTH // HEADS) for i, name in enumerate(given)}
    arguments = (
        x, x, x, WIDTH, HEADS, make(1, 3 * WIDTH, WIDTH), make(3, 3 * WIDTH), None, None,
        add_zero_attn, 0.0, make(2, WIDTH, WIDTH), make(4, WIDTH),
    )  # fmt: skip
    expected = F.multi_head_attention_forward(*arguments, **statics)
    found = multi_head_attention(*arguments, **statics)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("training", [True, False])
def test_attention_with_sixteen_bit_weights_never_multiplies_natively(training):
    built = module(batch_first=True).to(torch.bfloat16).train(training)
    x = make(0, BATCH, TARGET, WIDTH)
    with EmulatedProducts(BF16), torch.set_grad_enabled(training):
        output, _ = built(x, x, x, need_weights=False)
    assert torch.equal(output.float(), output.bfloat16().float())
