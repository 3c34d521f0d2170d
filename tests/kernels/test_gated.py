"""SwiGLU and GeGLU, against torch's own functions in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F

from narrowcast.kernels.gated import gated, gated_halves
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
# The interpreter cuts where a GPU rounds to nearest, so a whole step of the format.
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
EXACT = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
# What the activations are off by at most, for each unit of the gate: erf has seven digits.
SHARE = 2.0**-20


def drawn(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def assert_near(found, exact, size, dtype):
    bound = STEP[dtype] * exact.abs() + SHARE * size
    assert ((found.double() - exact).abs() <= bound).all()


# What the interpreter computes in numpy says so where a GPU does not.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1500), (7,)])
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("dtype", STEP)
def test_values_and_gradients_are_torchs_to_within_one_rounding(shape, activation, dtype):
    gate, value, grad = (drawn(*shape, dtype=dtype, seed=i) for i in range(3))
    wide = [t.double().requires_grad_() for t in (gate, value)]
    exact = EXACT[activation](wide[0]) * wide[1]
    want = torch.autograd.grad(exact, wide, grad.double())
    size = (gate.double().abs() + 1) * value.double().abs()
    inputs = [gate.requires_grad_(), value.requires_grad_()]
    found = gated(*inputs, activation)
    assert_near(found.detach(), exact.detach(), size, dtype)
    got = torch.autograd.grad(found, inputs, grad)
    wider = grad.double().abs()
    slack = (gate.detach().double().abs() + 1) ** 3 * wider
    assert_near(got[0], want[0], slack * value.detach().double().abs(), dtype)
    assert_near(got[1], want[1], slack, dtype)


@pytest.mark.parametrize("activation", EXACT)
def test_halves_of_one_tensor_give_what_two_tensors_do(activation):
    both = drawn(2, 3, 2 * 70, dtype=torch.bfloat16, seed=0).requires_grad_()
    grad = drawn(2, 3, 70, dtype=torch.bfloat16, seed=1)
    gate, value = (each.contiguous() for each in both.detach().chunk(2, -1))
    apart = [gate.requires_grad_(), value.requires_grad_()]
    expected, found = gated(*apart, activation), gated_halves(both, activation)
    assert torch.equal(found, expected)
    (got,) = torch.autograd.grad(found, both, grad)
    assert torch.equal(got, torch.cat(torch.autograd.grad(expected, apart, grad), -1))


def test_tensors_in_another_layout_are_read_as_what_they_are():
    gate, value, grad = (drawn(6, 4, dtype=torch.bfloat16, seed=i) for i in range(3))
    turned = [t.t().contiguous().t().requires_grad_() for t in (gate, value)]
    plain = [gate.requires_grad_(), value.requires_grad_()]
    found, expected = gated(*turned, "silu"), gated(*plain, "silu")
    assert torch.equal(found, expected)
    for a, b in zip(
        torch.autograd.grad(found, turned, grad.t().contiguous().t()),
        torch.autograd.grad(expected, plain, grad),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_sees_one_operator_each_way(dynamic):
    both = drawn(4, 32, dtype=torch.bfloat16, seed=0).requires_grad_()

    def work(both):
        gate, value = both.chunk(2, -1)
        return (gated_halves(both, "silu") * gated(gate, value, "gelu")).float().sum()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = [torch.autograd.grad(run(both), both)[0] for run in (work, compiled)]
    assert torch.equal(*results)
