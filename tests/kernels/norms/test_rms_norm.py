"""Rows by their root mean square, against float64 and torch's own gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.kernels.launch import interpreted
from narrowcast.kernels.norms import rms_norm

DEVICE = "cpu" if interpreted() else "cuda"
EPS = 1e-5
# The interpreter cuts where a GPU rounds to nearest, so a whole step of the format.
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def drawn(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def exactly(x, weight, offset):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (weight + offset)


@settings(max_examples=12)
@given(
    rows=st.integers(1, 9), width=st.sampled_from([4, 48, 64, 130]),
    dtype=st.sampled_from(list(STEP)), wide_weight=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]), rounds=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_are_right_to_the_format(
    rows, width, dtype, wide_weight, offset, rounds, seed
):
    x = drawn(rows, 3, width, dtype=dtype, seed=seed).requires_grad_()
    kept = torch.float32 if wide_weight else dtype
    weight = drawn(width, dtype=kept, seed=seed + 1).requires_grad_()
    grad = drawn(rows, 3, width, dtype=dtype, seed=seed + 2)
    found = rms_norm(x, weight, eps=EPS, offset=offset, rounds=rounds, dtype=dtype)
    assert found.dtype == dtype
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = exactly(wide_x, wide_w, offset)
    step, least = STEP[dtype], torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    # Rounded once or twice; below what is normal, to a multiple of the least number.
    bound = (1 + rounds) * (1.01 * step * exact.abs() + least * (1 + weight.double().abs()))
    assert ((found.double() - exact).abs() <= bound).all()
    got = torch.autograd.grad(found, (x, weight), grad)
    want = torch.autograd.grad(exact, (wide_x, wide_w), grad.double())
    assert [g.dtype for g in got] == [dtype, kept]
    # A difference of two numbers has the error of the larger; fp32 sums have some of their own.
    through = (grad.double() * (weight.double() + offset)).abs().amax()
    inverse = torch.rsqrt(wide_x.square().mean(-1) + EPS).amax()
    bound = step * want[0].abs() + 2.0**-18 * through * inverse + least
    assert ((got[0].double() - want[0]).abs() <= bound).all()
    terms = (grad.double() * exactly(wide_x, 1.0, 0.0)).abs().sum((0, 1))
    bound = STEP[kept] * want[1].abs() + (rounds * step + 2.0**-20) * terms + least
    assert ((got[1].double() - want[1]).abs() <= bound).all()


def test_only_the_input_and_the_weight_are_kept_for_the_backward_pass():
    x = drawn(4, 64, dtype=torch.bfloat16).requires_grad_()
    weight, kept = drawn(64, dtype=torch.float32).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, eps=EPS, offset=0.0, rounds=True, dtype=torch.bfloat16)
    assert [each.data_ptr() for each in kept] == [x.data_ptr(), weight.data_ptr()]


def test_more_rows_than_programs_hold_at_once_are_all_summed():
    x = drawn(3000, 16, dtype=torch.float32).requires_grad_()
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, eps=EPS, offset=0.0, rounds=False, dtype=torch.float32).sum().backward()
    expected = exactly(x.detach().double(), 1.0, 0.0).sum(0)
    assert torch.allclose(weight.grad.double(), expected, rtol=0, atol=3000 * 2.0**-22)


def test_what_is_not_finite_is_not_hidden():
    x = torch.ones(4, 16, dtype=torch.bfloat16, device=DEVICE)
    x[2, 7] = float("nan")
    found = rms_norm(
        x, torch.ones(16, device=DEVICE), eps=EPS, offset=0.0, rounds=True, dtype=x.dtype
    )
    assert (~found.isfinite()).any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_sees_one_operator_each_way(dynamic):
    x = drawn(4, 64, dtype=torch.bfloat16).requires_grad_()
    weight = drawn(64, dtype=torch.float32).requires_grad_()

    def work(x, weight):
        return (
            rms_norm(x, weight, eps=EPS, offset=1.0, rounds=False, dtype=x.dtype)
            .float()
            .square()
            .sum()
        )

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = [torch.autograd.grad(run(x, weight), (x, weight)) for run in (work, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
