"""The Hyena operator against its definition, with convolutions written out."""

import pytest
import torch
import torch.nn.functional as F

from narrowcast.workloads.genomics.models.hyena import HyenaOperator


def defined(operator, x):
    """As the paper writes it, with matrices of lags."""
    width, length = operator.width, x.shape[1]
    projected = operator.project(x).transpose(1, 2)
    pad = (2, 0) if operator.causal else (1, 1)
    weight, bias = operator.short.weight[:, None], operator.short.bias
    short = F.conv1d(F.pad(projected, pad), weight, bias, groups=len(bias))
    first, *gates, v = short.split(width, dim=1)
    filters = operator.filter(length)
    lag = torch.arange(length)[:, None] - torch.arange(length)
    for index, gate in enumerate(reversed(gates)):
        v = v * gate
        if operator.causal:
            matrix = filters[index][:, lag.clamp(min=0)] * (lag >= 0)
        else:
            matrix = filters[index][:, lag + length - 1]
        v = torch.einsum("cts,rcs->rct", matrix, v) + operator.filter.bias[index][:, None] * v
    return operator.out((first * v).transpose(1, 2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_equals_its_definition(order, causal):
    torch.manual_seed(0)
    operator = HyenaOperator(6, order=order, max_length=40, causal=causal).double()
    x = torch.randn(2, 29, 6, dtype=torch.float64)
    torch.testing.assert_close(operator(x), defined(operator, x), rtol=0, atol=1e-10)


def test_a_causal_operator_does_not_look_ahead():
    torch.manual_seed(0)
    operator = HyenaOperator(6, order=3, max_length=40).double()
    x = torch.randn(2, 29, 6, dtype=torch.float64)
    changed = x.clone()
    changed[:, 17] += 1
    difference = (operator(changed) - operator(x)).abs().amax((0, 2))
    assert difference[:17].max() < 1e-12
    assert difference[17:].min() > 1e-9


@pytest.mark.parametrize("left", [1, 2])
def test_the_operator_of_short_convolutions_is_torchs_where_there_are_no_kernels(left):
    torch.manual_seed(0)
    given = [torch.randn(s, requires_grad=True) for s in ((2, 9, 4), (4, 3), (4,))]
    x, weight, bias = given
    expected = F.conv1d(F.pad(x.transpose(1, 2), (left, 2 - left)), weight[:, None], bias, groups=4)
    plain = [t.detach() for t in given]
    found = torch.ops.narrowcast.short_convolution(*plain, left)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    grads = torch.ops.narrowcast.short_convolution_backward(grad, *plain, left)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, given, grad))
