"""Masked sites by kernels, against plain torch in fp64, on a GPU or in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from narrowcast.kernels.launch import interpreted
from narrowcast.workloads.decompose.components.folded import masked_output
from narrowcast.workloads.decompose.components.fused import fused_output
from narrowcast.workloads.decompose.components.kernels import operand  # noqa: F401  # interpreted
from narrowcast.workloads.decompose.components.mask import Draw, SiteMask

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
        "importance of 16 bits, turned": SiteMask(
            shares(count, rows, seeds, dtype=torch.bfloat16).detach().mT.transpose(0, 1).mT, 0.5
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
    scale = exact.abs().max()
    assert (found.double() - exact).abs().max() <= 4 * STEP[dtype] * terms**0.5 * scale


SHAPES = [(1, 70, 5, 6, 20), (3, 9, 16, 8, 24), (1, 20, 40, 24, 300)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", masks(1, 1, 1))
def test_outputs_and_gradients_are_those_of_plain_torch(shape, name):
    seeds, rows, d_in, _, count = shape
    given = case(torch.float32, *shape)
    mask = masks(seeds, rows, count)[name]
    if mask.importance.shape != (seeds, rows, count):
        mask = replace(mask, importance=mask.importance.reshape(seeds, rows, count))
    found = fused_output(**given, mask=mask, seed=None, stream=0)
    exactly = {key: in_fp64(value) for key, value in given.items()}
    exact = masked_output(**exactly, mask=wide(mask))
    assert_near(found, exact, torch.float32, count + d_in)
    down = torch.randn_like(found)
    expected = gradients(exact, exactly, wide(mask), down) if False else None
    again = wide(mask)
    exact = masked_output(**exactly, mask=again)
    expected = gradients(exact, exactly, again, down)
    for one, two in zip(gradients(found, given, mask, down), expected, strict=True):
        assert_near(one, two, torch.float32, rows * count)
