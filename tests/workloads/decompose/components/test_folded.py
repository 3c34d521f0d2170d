"""A masked site as one product, against its definition with all matrices formed."""

import pytest
import torch

from narrowcast.workloads.decompose.components.masked import (
    Draw,
    SiteMask,
    masked_embedding,
    masked_output,
)

SEEDS, ROWS, D_IN, D_OUT, C = 2, 7, 5, 6, 9


def some(*shape, dtype, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def shares(*shape, dtype):
    return torch.rand(*shape, dtype=dtype).requires_grad_()


def case(dtype, seeds=SEEDS, shared=False):
    torch.manual_seed(0)
    return {
        "x": some(seeds, ROWS, D_IN, dtype=dtype),
        "V": some(seeds, D_IN, C, dtype=dtype),
        "U": some(seeds, C, D_OUT, dtype=dtype),
        "weight_t": some(1 if shared else seeds, D_IN, D_OUT, dtype=dtype, grad=False),
        "bias": some(1 if shared else seeds, D_OUT, dtype=dtype, grad=False),
    }


def by_definition(x, V, U, weight_t, bias, mask):
    """Form every row's own weight: components times their masks, and what they leave."""
    source = mask.source if mask.source is not None else 0.0
    m = mask.importance + (1 - mask.importance) * source
    delta = torch.zeros(x.shape[:2], dtype=x.dtype) if mask.delta is None else mask.delta
    delta = torch.as_tensor(delta, dtype=x.dtype).expand(x.shape[:2])
    left = weight_t - V @ U
    weights = torch.einsum("sdc,snc,sco->sndo", V, m, U) + delta[..., None, None] * left[:, None]
    y = torch.einsum("snd,sndo->sno", x, weights) + bias[:, None]
    if mask.routed is not None:
        y = torch.where(mask.routed[..., None], y, x @ weight_t + bias[:, None])
    return y


def masks(dtype, seeds=SEEDS):
    g = shares(seeds, ROWS, C, dtype=dtype)
    full, shared = shares(seeds, ROWS, C, dtype=dtype), shares(seeds, 1, C, dtype=dtype)
    delta = shares(seeds, ROWS, dtype=dtype)
    routed = torch.rand(seeds, ROWS) < 0.5
    return {
        "drawn before": SiteMask(g, full, delta),
        "routed": SiteMask(g, full, delta, routed),
        "one source for all rows": SiteMask(g, shared, delta),
        "importance alone": SiteMask(g, 0.0),
        "importance alone, routed": SiteMask(g, 0.0, None, routed),
        "everything": SiteMask(g, 1.0, 1.0),
        "half of all": SiteMask(g, 0.5, 0.5, routed),
    }


@pytest.mark.pairwise
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", masks(torch.float32))
@pytest.mark.parametrize(("seeds", "shared"), [(1, False), (2, False), (2, True)])
def test_output_and_gradients_are_those_of_the_definition(name, seeds, shared, dtype, bound):
    given = case(dtype, seeds, shared)
    mask = masks(dtype, seeds)[name]
    found, expected = masked_output(**given, mask=mask), by_definition(**given, mask=mask)
    scale = expected.detach().abs().max()
    assert (found - expected).abs().max() <= bound * scale
    tensors = [*given.values(), mask.importance, mask.source, mask.delta]
    asked = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    down = torch.randn_like(expected)
    one, two = (torch.autograd.grad(y, asked, down, allow_unused=True) for y in (found, expected))
    for a, b in zip(one, two, strict=True):
        assert (a is None) == (b is None) or not (a if b is None else b).any()
        if a is not None and b is not None:
            assert (a - b).abs().max() <= bound * b.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("routed", [None, torch.zeros(SEEDS, ROWS, dtype=torch.bool)])
def test_with_everything_or_nothing_routed_it_is_the_target(routed):
    given = case(torch.float32)
    sources = (1.0, 1.0) if routed is None else (0.0, 0.3)
    mask = SiteMask(torch.rand(SEEDS, ROWS, C), *sources, routed)
    target = given["x"] @ given["weight_t"] + given["bias"][:, None]
    found = masked_output(**given, mask=mask)
    torch.testing.assert_close(found, target, rtol=0, atol=1e-5)


def test_an_embedding_is_the_product_of_its_lines_chosen_by_ones():
    torch.manual_seed(0)
    tokens = torch.randint(0, D_IN, (SEEDS, ROWS))
    given = case(torch.float64, shared=True)
    mask = masks(torch.float64)["routed"]
    found = masked_embedding(tokens, given["V"], given["U"], given["weight_t"][0], mask)
    ones = torch.nn.functional.one_hot(tokens, D_IN).double()
    given |= {"x": ones, "bias": torch.zeros(1, D_OUT, dtype=torch.float64)}
    torch.testing.assert_close(found, by_definition(**given, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "variance"), [("continuous", 1 / 12), ("binomial", 1 / 4)])
def test_draws_are_new_each_time_and_have_the_moments_of_their_kind(kind, variance):
    rows, count = 400, 50
    x = torch.ones(1, rows, 1)
    identity = torch.eye(count)[None]
    mask = SiteMask(torch.zeros(1, rows, count), Draw(kind))
    first, second = (
        masked_output(x, torch.ones(1, 1, count), identity, torch.ones(1, 1, count), None, mask)
        for _ in range(2)
    )
    # Five standard errors of a mean of 20,000, and of a variance no wider than that of the uniform.
    assert abs(first.mean() - 0.5) < 5 * (variance / first.numel()) ** 0.5
    assert abs(first.var() - variance) < 5 * (1 / 180 / first.numel()) ** 0.5
    assert not torch.equal(first, second)


def test_weights_of_a_16_bit_target_meet_components_in_fp32():
    given = case(torch.float32)
    narrow = {name: given[name].bfloat16() for name in ("x", "weight_t", "bias")}
    mask = masks(torch.float32)["routed"]
    found = masked_output(**given | narrow, mask=mask)
    wide = {name: value.float() for name, value in narrow.items()}
    expected = by_definition(**given | wide, mask=mask)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-8, atol=1e-5)


def test_autocast_decides_the_format_of_products_and_gradients_come_back_in_fp32():
    given, mask = case(torch.float32), masks(torch.float32)["routed"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = masked_output(**given, mask=mask)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert given["V"].grad.dtype == torch.float32
    expected = by_definition(**given, mask=mask)
    # Operands and activations are rounded, 2^-9 each, to sums of C + d_in products.
    scale = expected.detach().abs().max()
    assert (found - expected).abs().max() < 4 * 2.0**-9 * (C + D_IN) ** 0.5 * scale
