"""Rows less their mean by their spread, against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.kernels.launch import interpreted
from narrowcast.kernels.norms import layer_norm

DEVICE = "cpu" if interpreted() else "cuda"
EPS = 1e-5
# The interpreter cuts where a GPU rounds to nearest, so a whole step of the format.
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def drawn(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@settings(max_examples=12)
@given(
    rows=st.integers(1, 9), width=st.sampled_from([4, 48, 64, 130]),
    dtype=st.sampled_from(list(STEP)), wide_weight=st.booleans(), wide_result=st.booleans(),
    biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_are_right_to_the_format(
    rows, width, dtype, wide_weight, wide_result, biased, seed
):
    kept = torch.float32 if wide_weight else dtype
    result = torch.float32 if wide_result else dtype
    x = drawn(rows, 3, width, dtype=dtype, seed=seed).requires_grad_()
    weight = drawn(width, dtype=kept, seed=seed + 1).requires_grad_()
    bias = drawn(width, dtype=kept, seed=seed + 2).requires_grad_() if biased else None
    grad = drawn(rows, 3, width, dtype=result, seed=seed + 3)
    found = layer_norm(x, weight, bias, eps=EPS, dtype=result)
    assert found.dtype == result
    given_ = [x, weight] + ([bias] if biased else [])
    wide = [each.detach().double().requires_grad_() for each in given_]
    exact = F.layer_norm(wide[0], (width,), wide[1], wide[2] if biased else None, eps=EPS)
    # A sum has the error of its larger part; fp32 has some of its own in a row's mean.
    parts = wide[1].abs() * 4 + (wide[2].abs() if biased else 0)
    least = torch.finfo(result).smallest_normal * torch.finfo(result).eps
    assert ((found - exact).abs() <= STEP[result] * exact.abs() + 2.0**-19 * parts + least).all()
    got = torch.autograd.grad(found, given_, grad)
    want = torch.autograd.grad(exact, wide, grad.double())
    assert [each.dtype for each in got] == [each.dtype for each in given_]
    spread = (wide[0].var(-1, correction=0) + EPS).sqrt().amin()
    through = (grad.double() * wide[1]).abs().amax()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = STEP[dtype] * want[0].abs() + 2.0**-17 * through / spread + least
    assert ((got[0] - want[0]).abs() <= bound).all()
    normed = F.layer_norm(wide[0], (width,), eps=EPS)
    for each, sure, terms in zip(got[1:], want[1:], (grad * normed, grad.double()), strict=False):
        bound = STEP[kept] * sure.abs() + 2.0**-18 * terms.abs().sum((0, 1)) + 2.0**-120
        assert ((each - sure).abs() <= bound).all()


def test_a_row_far_from_zero_keeps_its_digits():
    x = (drawn(4, 256, dtype=torch.float32) + 1000).requires_grad_()
    weight = torch.ones(256, device=DEVICE)
    found = layer_norm(x, weight, None, eps=EPS, dtype=torch.float32)
    exact = F.layer_norm(x.detach().double(), (256,), eps=EPS)
    # 1000 has spacings of 2**-14 in fp32: the row itself is no better known.
    assert (found - exact).abs().max() <= 2.0**-12


def test_a_norm_over_two_dimensions_is_torchs():
    x, weight = drawn(5, 4, 6, dtype=torch.float32), drawn(4, 6, dtype=torch.float32, seed=1)
    bias = drawn(4, 6, dtype=torch.float32, seed=2).requires_grad_()
    found = layer_norm(x, weight.requires_grad_(), bias, eps=EPS, dtype=torch.float32)
    expected = F.layer_norm(x, (4, 6), weight, bias, eps=EPS)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (weight, bias)),
        torch.autograd.grad(expected.sum(), (weight, bias)),
        strict=True,
    ):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=2.0**-18, rtol=2.0**-18)


@pytest.mark.parametrize("trained", ["weight", "bias", "neither"])
def test_what_is_frozen_gets_no_gradient(trained):
    x = drawn(3, 16, dtype=torch.float32).requires_grad_()
    weight, bias = torch.ones(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    named = {"weight": weight, "bias": bias}
    if trained in named:
        named[trained].requires_grad_()
    layer_norm(x, weight, bias, eps=EPS, dtype=torch.float32).square().sum().backward()
    assert {name for name, each in named.items() if each.grad is not None} == {trained} - {
        "neither"
    }
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that nobody stores
def test_without_an_epsilon_the_gradients_are_torchs_too():
    x = drawn(3, 6, dtype=torch.float32).requires_grad_()  # fewer rows than a program takes
    weight, bias = (drawn(6, dtype=torch.float32, seed=s).requires_grad_() for s in (1, 2))
    found = layer_norm(x, weight, bias, eps=0.0, dtype=torch.float32).square().sum()
    expected = F.layer_norm(x, (6,), weight, bias, eps=0.0).square().sum()
    ours, theirs = (torch.autograd.grad(each, (x, weight, bias)) for each in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 2.0**-16 * b.abs().max()


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_the_operators_are_as_torch_wants_them(needs):
    x, grad = (drawn(5, 6, dtype=torch.float32, seed=s) for s in (0, 1))
    weight, bias = (drawn(6, dtype=torch.float32, seed=s) for s in (2, 3))
    ops, tests = torch.ops.narrowcast, ("test_schema", "test_faketensor")
    given = (x, weight, bias, EPS, torch.bfloat16)
    torch.library.opcheck(ops.layer_norm.default, given, test_utils=tests)
    given = (grad, x, weight, EPS, *needs)
    torch.library.opcheck(ops.layer_norm_back.default, given, test_utils=tests)


def test_only_the_input_and_the_weight_are_kept_for_the_backward_pass():
    x = drawn(4, 64, dtype=torch.bfloat16).requires_grad_()
    weight, kept = drawn(64, dtype=torch.float32).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer_norm(x, weight, weight.detach(), eps=EPS, dtype=torch.bfloat16)
    assert [each.data_ptr() for each in kept] == [x.data_ptr(), weight.data_ptr()]


def test_what_is_not_finite_is_not_hidden():
    x = torch.ones(4, 16, dtype=torch.bfloat16, device=DEVICE)
    x[2, 7] = float("nan")
    found = layer_norm(x, torch.ones(16, device=DEVICE), None, eps=EPS, dtype=x.dtype)
    assert (~found.isfinite()).any(1).tolist() == [False, False, True, False]


def test_a_compiler_sees_one_operator_each_way():
    x = drawn(4, 64, dtype=torch.bfloat16).requires_grad_()
    weight, bias = (drawn(64, dtype=torch.float32, seed=s).requires_grad_() for s in (1, 2))

    def work(*given):
        return layer_norm(*given, eps=EPS, dtype=torch.bfloat16).float().square().sum()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(run(x, weight, bias), (x, weight, bias))
               for run in (work, compiled)]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
