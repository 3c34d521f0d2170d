import math

import pytest
import torch
from torch import nn

from narrowcast.precision.gradients.check import check_norms, clip_factor, gradient_norms


def gradients(*values):
    return [torch.tensor(v) for v in values]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_element_anywhere_makes_the_step_not_finite(bad, place):
    given = [torch.ones(1000), torch.ones(7)]
    given[place][-1] = bad
    assert not check_norms(gradient_norms(given), None).finite


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1000,)])
@pytest.mark.parametrize("value", [1e20, -1e25, 3e38])
def test_a_gradient_whose_square_overflows_is_not_finite_whatever_its_shape(shape, value):
    """Adam would put that infinity into its second moment."""
    assert not check_norms(gradient_norms([torch.full(shape, value)]), None).finite


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-20, 1.0, 1e15])
def test_a_finite_gradient_passes(value):
    assert check_norms(gradient_norms([torch.full((10,), value)]), None).finite


def test_the_norm_is_torchs_with_the_scale_divided_out():
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(100, generator=generator) for _ in range(5)]
    plain = torch.nn.utils.get_total_norm(given)
    scaled = [g * 1024 for g in given]
    assert check_norms(gradient_norms(given), None).norm == plain
    assert check_norms(gradient_norms(scaled), torch.tensor(1 / 1024)).norm == plain
    each = torch.full((5,), 1 / 1024)
    assert check_norms(gradient_norms(scaled), each).norm == plain


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_multiplies_by_what_torch_multiplies_by(limit):
    weight = nn.Parameter(torch.zeros(100))
    weight.grad = torch.randn(100, generator=torch.Generator().manual_seed(0))
    mine = weight.grad * clip_factor(torch.linalg.vector_norm(weight.grad), limit)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    assert torch.equal(mine, weight.grad)
