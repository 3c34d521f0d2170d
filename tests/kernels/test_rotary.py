"""Turned heads, against complex numbers in float64 and torch's own gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.kernels.launch import interpreted
from narrowcast.kernels.rotary import turn_halves, turn_heads
from narrowcast.workloads.lm.model import rotary_table

DEVICE = "cpu" if interpreted() else "cuda"


def heads_of(batch, length, count, width, *, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, count, width, generator=generator).to(dtype).to(DEVICE)


def exactly(heads, table, queries):
    """Queries, keys and values with complex numbers in float64."""
    keys = (heads.shape[2] - queries) // 2
    turning = heads[:, :, : queries + keys].double()
    pairs = torch.view_as_complex(turning.unflatten(-1, (-1, 2)).contiguous())
    angles = torch.view_as_complex(table.double().to(heads.device))
    turned = torch.view_as_real(pairs * angles).flatten(-2)
    return turned[:, :, :queries], turned[:, :, queries:], heads[:, :, queries + keys :].double()


def table_for(length, width):
    return rotary_table(length, width, base=1e4).to(DEVICE)


# The interpreter cuts where a GPU rounds to nearest, so a whole step of the format.
STEP = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def assert_near(found, exact, dtype):
    # Before it is rounded, a difference of two products has the error of the larger one.
    bound = STEP[dtype] * exact.abs() + 2.0**-22 * exact.abs().max()
    assert ((found.double() - exact).abs() <= bound).all()


@settings(max_examples=12)
@given(
    batch=st.integers(1, 2), length=st.integers(1, 5), queries=st.integers(1, 5),
    keys=st.integers(1, 3), width=st.sampled_from([2, 6, 16, 64]),
    dtype=st.sampled_from(list(STEP)), seed=st.integers(0, 99),
)  # fmt: skip
def test_heads_are_turned_and_gradients_turned_back(
    batch, length, queries, keys, width, dtype, seed
):
    heads = heads_of(batch, length, queries + 2 * keys, width, dtype=dtype, seed=seed)
    table = table_for(length, width)
    heads.requires_grad_()
    found = turn_heads(heads, table, queries=queries)
    expected = exactly(heads.detach(), table, queries)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == dtype
        assert_near(a.detach(), b, dtype)
    grads = [heads_of(*part.shape, dtype=dtype, seed=seed + 1) for part in found]
    (got,) = torch.autograd.grad(found, heads, grads)
    wide = heads.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(
        exactly(wide, table, queries), wide, [each.double() for each in grads]
    )
    assert_near(got, want, dtype)


def test_gradients_in_another_layout_are_read_as_what_they_are():
    heads = heads_of(2, 3, 6, 16, dtype=torch.bfloat16).requires_grad_()
    found = turn_heads(heads, table_for(3, 16), queries=2)
    grads = [heads_of(*part.shape, dtype=torch.bfloat16, seed=1) for part in found]
    (plain,) = torch.autograd.grad(found, heads, grads, retain_graph=True)
    # As attention gives them: heads before positions; and with a last dimension that is not dense.
    by_heads = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in grads]
    by_width = [each.transpose(1, 3).contiguous().transpose(1, 3) for each in grads]
    for other in (by_heads, by_width):
        (again,) = torch.autograd.grad(found, heads, other, retain_graph=True)
        assert torch.equal(plain, again)


def test_only_the_table_is_kept_for_the_backward_pass():
    heads = heads_of(1, 4, 6, 16, dtype=torch.bfloat16).requires_grad_()
    table, kept = table_for(4, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        turn_heads(heads, table, queries=2)
    assert [each.data_ptr() for each in kept] == [table.data_ptr()]


# Of torch's compiler itself, when it traces an autograd function.
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_sees_one_operator_each_way(dynamic):
    heads = heads_of(2, 4, 6, 16, dtype=torch.bfloat16).requires_grad_()
    table = table_for(4, 16)

    def work(heads):
        query, key, value = turn_heads(heads, table, queries=2)
        return (query.float().sum() - (key * value).float().sum()).square()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = [torch.autograd.grad(run(heads), heads)[0] for run in (work, compiled)]
    assert torch.equal(*results)


def halves_exactly(x, cosine, sine):
    """As transformers' models turn their heads, in float64: (batch, length, head, width)."""
    first, second = x.chunk(2, -1)
    return x * cosine[:, :, None] + torch.cat((-second, first), -1) * sine[:, :, None]


@settings(max_examples=12)
@given(
    batch=st.integers(1, 2), length=st.integers(1, 5), queries=st.integers(1, 5),
    keys=st.integers(1, 3), width=st.sampled_from([2, 6, 16, 96]), shared=st.booleans(),
    dtype=st.sampled_from(list(STEP)), angles=st.sampled_from(list(STEP)), seed=st.integers(0, 99),
)  # fmt: skip
def test_halves_are_turned_and_gradients_turned_back(
    batch, length, queries, keys, width, shared, dtype, angles, seed
):
    given = [
        heads_of(batch, count, length, width, dtype=dtype, seed=seed + i).requires_grad_()
        for i, count in enumerate((queries, keys))
    ]
    table = heads_of(1 if shared else batch, length, 2, width, dtype=angles, seed=seed + 2)
    cosine, sine = table[:, :, 0], table[:, :, 1]  # not angles at all: each number has its own
    found = turn_halves(*given, cosine, sine)
    grads = [heads_of(*each.shape, dtype=dtype, seed=seed + 3) for each in given]
    got = torch.autograd.grad(found, given, grads)
    for x, turned, grad, back in zip(given, found, grads, got, strict=True):
        wide = x.detach().double().requires_grad_()
        exact = halves_exactly(wide.transpose(1, 2), cosine.double(), sine.double())
        exact = exact.transpose(1, 2)
        (want,) = torch.autograd.grad(exact, wide, grad.double())
        assert turned.dtype == back.dtype == dtype
        assert_near(turned.detach(), exact.detach(), dtype)
        assert_near(back, want, dtype)


def test_turned_halves_may_be_written_to_as_any_result():
    """As models do that scale their queries in place; a view of something else could not be."""
    query, key = (heads_of(2, n, 3, 16, dtype=torch.bfloat16, seed=n) for n in (4, 2))
    given = [query.requires_grad_(), key.requires_grad_()]
    table = heads_of(1, 3, 2, 16, dtype=torch.float32, seed=9)

    def gradients(factor):
        turned, other = turn_halves(*given, table[:, :, 0], table[:, :, 1])
        assert not turned._is_view()
        turned = turned.mul_(2) if factor is None else turned * factor
        return torch.autograd.grad(turned.float().sum() + other.float().sum(), given)

    assert all(map(torch.equal, gradients(None), gradients(2)))


def test_halves_are_turned_wherever_they_lie():
    query, key = (heads_of(2, n, 3, 16, dtype=torch.bfloat16, seed=n) for n in (4, 2))
    table = heads_of(2, 3, 2, 16, dtype=torch.bfloat16, seed=9)
    plain = turn_halves(query, key, table[:, :, 0], table[:, :, 1])
    other = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key))
    again = turn_halves(*other, table[:, :, 0], table[:, :, 1])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_compiler_sees_one_operator_for_halves():
    query, key = (heads_of(2, n, 3, 16, dtype=torch.bfloat16, seed=n) for n in (4, 2))
    given = [query.requires_grad_(), key.requires_grad_()]
    table = heads_of(1, 3, 2, 16, dtype=torch.float32, seed=9)

    def work(query, key):
        turned = turn_halves(query, key, table[:, :, 0], table[:, :, 1])
        return turned[0].float().square().sum() - turned[1].float().sum()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(run(*given), given) for run in (work, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
