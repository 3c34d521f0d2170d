"""An MLP for each component, against the same written with torch's layers in fp64."""

import pytest
import torch
import torch.nn.functional as F

from narrowcast.kernels.launch import interpreted
from narrowcast.workloads.decompose.components.kernels import importance  # noqa: F401  # interpreted
from narrowcast.workloads.decompose.importance.networks import scalar_mlp

DEVICE = "cpu" if interpreted() else "cuda"
# The GELU of the kernels is that of Abramowitz and Stegun, see tests/kernels/test_gelu.py.
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def case(seeds, rows, count, units, dtype=torch.float32):
    torch.manual_seed(0)
    hidden, last = (seeds, count, units), (seeds, count)
    shapes = [(seeds, rows, count), hidden, hidden, hidden, last]
    given = [torch.randn(shape, device=DEVICE) for shape in shapes]
    given[0] = given[0].to(dtype)
    return [each.requires_grad_() for each in given]


def by_layers(h, w1, b1, w2, b2):
    """Call a linear layer of one input and one output for every component."""
    out = torch.empty_like(h)
    for s in range(h.shape[0]):
        for c in range(h.shape[2]):
            inner = F.gelu(F.linear(h[s, :, c, None], w1[s, c, :, None], b1[s, c]))
            out[s, :, c] = F.linear(inner, w2[s, c, None], b2[s, c, None])[:, 0]
    return out


def compared(given, step, forget=()):
    for index in forget:
        given[index] = given[index].detach()
    exactly = [each.detach().double().requires_grad_(each.requires_grad) for each in given]
    found, exact = scalar_mlp(*given), by_layers(*exactly)
    assert found.dtype == given[0].dtype
    down = torch.randn_like(found)
    asked = [[each for each in them if each.requires_grad] for them in (given, exactly)]
    ours = torch.autograd.grad(found, asked[0], down)
    theirs = torch.autograd.grad(exact, asked[1], down.double())
    for one, two in zip((found, *ours), (exact, *theirs), strict=True):
        assert one.shape == two.shape
        # Weights' gradients are sums over rows of what is rounded alike.
        bound = 4 * step * max(1.0, two.detach().abs().max())
        assert (one.double() - two).abs().max() <= bound


SHAPES = [(1, 5, 3, 16), (2, 9, 40, 4), (1, 20, 3, 20), (1, 3, 2, 1), (2, 4, 5, 33)]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_plain_torch_it_is_a_layer_for_each_component(shape):
    compared(case(*shape), 1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_by_kernels_it_is_the_same(shape):
    compared(case(*shape), STEP[torch.float32])


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits_give_numbers_of_16_bits_from_weights_in_fp32(dtype):
    compared(case(1, 9, 12, 16, dtype), STEP[dtype])


@pytest.mark.interpreted
@pytest.mark.parametrize("units", [8, 24])
def test_an_input_that_wants_no_gradient_gets_none(units):
    compared(case(1, 5, 6, units), STEP[torch.float32], forget=(0,))


@pytest.mark.interpreted
def test_no_hidden_layer_is_kept_for_the_backward_pass():
    given, kept = case(1, 50, 8, 16), []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scalar_mlp(*given)
    assert sum(kept) == 50 * 8 + 3 * 8 * 16


@pytest.mark.interpreted
def test_it_compiles_without_a_break():
    given = case(1, 4, 6, 5)
    compiled = torch.compile(scalar_mlp, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*given).sum(), given)
    for one, two in zip(ours, torch.autograd.grad(scalar_mlp(*given).sum(), given), strict=True):
        assert torch.equal(one, two)
