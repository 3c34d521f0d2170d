"""The GELU of 16-bit tensors, against torch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from narrowcast.kernels.gelu import gelu, gelu_back
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
# The interpreter cuts where a GPU rounds to nearest, so a whole step of the format.
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# erf by Abramowitz and Stegun 7.1.26, see test_fp8.
ERF = 2.0**-20


def values(dtype):
    """Everything between the tails, where the function is neither x nor zero."""
    x = torch.cat([torch.linspace(-9, 9, 5001), torch.tensor([0.0, -0.0, 3e4, -3e4])])
    return x.to(dtype).to(DEVICE)


def assert_near(found, exact, x, dtype):
    bound = STEP[dtype] * exact.abs() + ERF * x.double().abs().clamp(min=1.0)
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", STEP)
def test_value_and_gradient_are_torchs_to_within_one_rounding(dtype):
    x = values(dtype)
    grad = torch.linspace(-2, 2, len(x)).to(dtype).to(DEVICE)
    wide = x.double().requires_grad_()
    exact = F.gelu(wide)
    (slope,) = torch.autograd.grad(exact, wide, grad.double())
    assert_near(gelu(x), exact.detach(), x, dtype)
    grad_x, again = gelu_back(grad, x)
    assert_near(grad_x, slope, 2 * x, dtype)
    assert torch.equal(again, gelu(x))


# What the interpreter multiplies in numpy says so where a GPU does not.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad):
    x = torch.zeros(64, dtype=torch.bfloat16, device=DEVICE)
    x[7] = bad
    assert (~gelu(x).isfinite()).nonzero().tolist() == [[7]]
    assert (~gelu_back(torch.ones_like(x), x)[0].isfinite()).nonzero().tolist() == [[7]]


def test_a_tensor_of_any_shape_and_layout_is_read_as_what_it_is():
    x = torch.randn(3, 5, 7, device=DEVICE).bfloat16()
    turned = x.transpose(0, 2)
    assert torch.equal(gelu(turned), gelu(x).transpose(0, 2))
    grads, again = gelu_back(turned, turned)
    assert torch.equal(grads, gelu_back(x, x)[0].transpose(0, 2))
    assert again.shape == turned.shape
