"""Masked sites by kernels, against plain torch in fp64, on a GPU or in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowcast.kernels.launch import interpreted
from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.kernels import site  # noqa: F401  # interpreted
from narrowcast.workloads.decompose.components.masked import (
    Draw,
    SiteMask,
    fused_output,
    masked_output,
)
from narrowcast.workloads.decompose.components.sites import find_sites

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = pytest.mark.interpreted
# Half a step of the format, or a whole one where the interpreter cuts off what a GPU rounds.
STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def some(*shape, dtype, grad=True):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(grad)


def shares(*shape, dtype=torch.float32):
    return torch.rand(*shape, device=DEVICE).to(dtype).requires_grad_()


def case(dtype, seeds, rows, d_in, d_out, count):
    torch.manual_seed(0)
    return {
        "x": some(seeds, rows, d_in, dtype=dtype),
        "V": some(seeds, d_in, count, dtype=dtype),
        "U": some(seeds, count, d_out, dtype=dtype),
        "weight_t": some(1, d_in, d_out, dtype=dtype, grad=False),
        "bias": some(seeds, d_out, dtype=dtype, grad=False),
    }


def masks(seeds, rows, count):
    g, delta = shares(seeds, rows, count), shares(seeds, rows)
    routed = torch.rand(seeds, rows, device=DEVICE) < 0.5
    return {
        "given": SiteMask(g, shares(seeds, rows, count), delta),
        "given, routed": SiteMask(g, shares(seeds, rows, count), delta, routed),
        "one source for all rows": SiteMask(g, shares(seeds, 1, count), delta, routed),
        "one source for all": SiteMask(g, shares(1, 1, count), shares(seeds, 1)),
        "importance alone": SiteMask(g, 0.0),
        "importance alone, routed": SiteMask(g, 0.0, None, routed),
        "numbers": SiteMask(g, 0.25, 0.5, routed),
        "turned and narrow": SiteMask(
            shares(count, rows, seeds, dtype=torch.bfloat16).permute(2, 1, 0), 0.5, delta.half()
        ),
    }


def in_fp64(value):
    return value.detach().double().requires_grad_(value.requires_grad)


def wide(mask):
    tensors = {
        name: in_fp64(getattr(mask, name))
        for name in ("importance", "source", "delta")
        if isinstance(getattr(mask, name), torch.Tensor)
    }
    return replace(mask, **tensors)


def gradients(out, given, mask, down):
    tensors = [*given.values(), mask.importance, mask.source, mask.delta]
    asked = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.autograd.grad(out, asked, down.to(out.dtype))


def assert_near(found, exact, dtype, terms):
    """Operands are rounded twice or thrice, and errors of a sum grow as the root of its terms."""
    scale = exact.abs().max().clamp(min=1.0)
    assert (found.double() - exact).abs().max() <= 4 * STEP[dtype] * terms**0.5 * scale


def compared(given, mask, dtype=torch.float32):
    """Compare output and every gradient with plain torch in fp64."""
    exactly, exact_mask = {key: in_fp64(value) for key, value in given.items()}, wide(mask)
    found = fused_output(**given, mask=mask, seed=None, stream=0)
    exact = masked_output(**exactly, mask=exact_mask)
    _, rows, d_in = given["x"].shape
    count = given["V"].shape[-1]
    assert found.dtype == dtype
    assert_near(found, exact, dtype, count + d_in)
    down = torch.randn_like(found)
    pairs = zip(
        gradients(found, given, mask, down),
        gradients(exact, exactly, exact_mask, down),
        strict=True,
    )
    for one, two in pairs:
        narrow = max((dtype, one.dtype), key=STEP.__getitem__)
        assert_near(one, two, narrow, max(rows, count))


SHAPES = [(1, 70, 5, 6, 20), (3, 9, 16, 8, 24), (1, 9, 40, 24, 300)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", masks(1, 1, 1))
def test_outputs_and_gradients_are_those_of_plain_torch(shape, name):
    seeds, rows, _, _, count = shape
    compared(case(torch.float32, *shape), masks(seeds, rows, count)[name])


def test_a_source_for_all_rows_has_the_gradient_of_each_seeds_own_rows():
    shape = seeds, rows, _, _, count = 2, 128, 5, 6, 20
    compared(case(torch.float32, *shape), masks(seeds, rows, count)["one source for all rows"])


def test_components_turned_around_as_those_of_tied_sites_are_read_as_they_lie():
    given = case(torch.float32, *SHAPES[0])
    turned = {name: given[name].mT.detach().clone().requires_grad_().mT for name in ("V", "U")}
    compared(given | turned, masks(1, 70, 20)["given, routed"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["given, routed", "numbers"])
def test_in_16_bits_they_are_those_to_within_their_rounding(dtype, name):
    seeds, rows, _, _, count = SHAPES[1]
    compared(case(dtype, *SHAPES[1]), masks(seeds, rows, count)[name], dtype)


@pytest.mark.parametrize("fixed", ["x", "V", "U"])
def test_what_wants_no_gradient_gets_none_and_changes_no_other(fixed):
    given = case(torch.float32, *SHAPES[0])
    given[fixed] = given[fixed].detach()
    _, rows, _, _, count = SHAPES[0]
    compared(given, replace(masks(1, rows, count)["given, routed"], delta=0.5))


def drawn(kind, *, rows=150, count=40, seed=None, stream=0, seeds=1):
    """Return draws as they are: of ones through an identity, with nothing important."""
    ones = torch.ones(seeds, 1, count, device=DEVICE)
    identity = torch.eye(count, device=DEVICE).expand(seeds, -1, -1)
    g = torch.zeros(seeds, rows, count, device=DEVICE, requires_grad=True)
    mask = SiteMask(g, Draw(kind))
    x = torch.ones(seeds, rows, 1, device=DEVICE)
    out = fused_output(x, ones, identity, ones, None, mask, seed=seed, stream=stream)
    return out.detach(), torch.autograd.grad(out.sum(), g)[0]


@pytest.mark.parametrize(("kind", "variance"), [("continuous", 1 / 12), ("binomial", 1 / 4)])
def test_draws_have_the_moments_of_their_kind_and_no_two_places_share_theirs(kind, variance):
    found, _ = drawn(kind, seeds=2)
    assert found.min() >= 0
    assert found.max() <= 1
    # Five standard errors of the mean, of the variance, and of correlations between lines.
    assert abs(found.mean() - 0.5) < 5 * (variance / found.numel()) ** 0.5
    assert abs(found.var() - variance) < 5 * (1 / 180 / found.numel()) ** 0.5
    if kind == "continuous":
        # Of 2^24 numbers 12,000 have 4.3 pairs by chance; 5 times the root of 4.3 more.
        assert found.unique().numel() > found.numel() - 15
    rows = found.flatten(0, 1) - 0.5
    between = (rows @ rows.T / rows.shape[1] / variance).fill_diagonal_(0)
    assert between.abs().max() < 7 / rows.shape[1] ** 0.5
    columns = (rows.T @ rows / rows.shape[0] / variance).fill_diagonal_(0)
    assert columns.abs().max() < 7 / rows.shape[0] ** 0.5


def test_a_seed_decides_draws_and_a_stream_tells_sites_apart():
    seed = torch.tensor([2**61 + 5], device=DEVICE)
    one, _ = drawn("continuous", seed=seed)
    again, _ = drawn("continuous", seed=seed)
    other, _ = drawn("continuous", seed=seed, stream=1)
    third, _ = drawn("continuous", seed=seed + 2**32)
    assert torch.equal(one, again)
    for different in (other, third, drawn("continuous")[0]):
        # Numbers of 24 bits are the same by chance once in 2^24 times.
        assert (one == different).float().mean() < 0.001


@pytest.mark.parametrize("kind", ["continuous", "binomial"])
def test_the_backward_pass_draws_what_the_forward_pass_drew(kind):
    source, grad = drawn(kind, count=90)
    # Nothing is important, so that the gradient of importance is 1 - s.
    torch.testing.assert_close(grad, 1 - source)


def test_what_is_left_takes_part_by_a_draw_of_its_own_for_each_row():
    rows = 400
    x = torch.ones(1, rows, 1, device=DEVICE)
    zeros, ones = torch.zeros(1, 1, 8, device=DEVICE), torch.ones(1, 1, 1, device=DEVICE)
    mask = SiteMask(torch.zeros(1, rows, 8, device=DEVICE), Draw(), Draw())
    found = fused_output(x, zeros, zeros.mT, ones, None, mask, seed=None, stream=0)
    assert abs(found.mean() - 0.5) < 5 * (1 / 12 / rows) ** 0.5
    assert found.unique().numel() > rows - 3


def test_gradients_of_fp32_components_under_autocast_are_in_fp32():
    given = case(torch.float32, *SHAPES[1])
    mask = masks(3, 9, 24)["given, routed"]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = masked_output(**given, mask=mask)
    exactly, exact_mask = {key: in_fp64(value) for key, value in given.items()}, wide(mask)
    exact = masked_output(**exactly, mask=exact_mask)
    assert_near(found, exact, torch.bfloat16, 40)
    down = torch.randn_like(found)
    ours = gradients(found, given, mask, down)
    for one, two in zip(ours, gradients(exact, exactly, exact_mask, down), strict=True):
        assert one.dtype == torch.float32
        assert_near(one, two, torch.bfloat16, 24)


def test_a_backward_pass_keeps_no_mask_and_no_operand():
    """What is kept for it: x, h and importance, and weights."""
    seeds, rows, d_in, d_out, count = shape = (1, 64, 16, 8, 24)
    given = case(torch.float32, *shape)
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    mask = SiteMask(shares(seeds, rows, count), Draw(), Draw())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused_output(**given, mask=mask, seed=None, stream=0)
    of_rows = rows * (d_in + count + count)
    of_weights = d_in * count + (count + d_in) * d_out + 1
    assert sum(kept.values()) == of_rows + of_weights


def test_a_compiled_pass_is_one_graph_with_the_kernels_as_operators():
    given, mask = case(torch.float32, *SHAPES[1]), masks(3, 9, 24)["given, routed"]
    compiled = torch.compile(masked_output, fullgraph=True, backend="aot_eager")
    found, expected = compiled(**given, mask=mask), masked_output(**given, mask=mask)
    assert torch.equal(found, expected)
    down = torch.randn_like(found)
    ours = gradients(found, given, mask, down)
    for one, two in zip(ours, gradients(expected, given, mask, down), strict=True):
        assert torch.equal(one, two)


def test_sites_of_a_pass_draw_apart_and_a_pass_computed_again_draws_the_same():
    torch.manual_seed(0)
    target = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(DEVICE)
    decomposition = Decomposition(target, find_sites(target, {"*": 8}))
    x = torch.randn(4, 6, device=DEVICE)
    given = [SiteMask(shares(1, 4, 8), Draw(), Draw()) for _ in range(2)]

    def grads(loss):
        return torch.autograd.grad(loss, list(decomposition.components.parameters()))

    def loss(x):
        return decomposition(x, masks=given).output.square().sum()

    torch.manual_seed(1)
    kept = grads(loss(x))
    torch.manual_seed(1)
    again = grads(checkpoint(loss, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    torch.manual_seed(2)
    assert not torch.equal(kept[0], grads(loss(x))[0])


def test_a_cuda_graph_draws_anew_whenever_it_is_replayed(cuda):
    given = case(torch.bfloat16, 1, 64, 16, 8, 24)
    mask = SiteMask(torch.zeros(1, 64, 24, device=cuda), Draw(), Draw())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            masked_output(**given, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = masked_output(**given, mask=mask)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
    assert not torch.equal(*seen)
