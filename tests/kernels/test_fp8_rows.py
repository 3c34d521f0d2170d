"""A scale for each row and each column, against the emulation's and torch's own products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from narrowcast.kernels.fp8_groups import _empty, _plainly, quantize_groups
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics import E4M3, E5M2, quantize

DEVICE = "cpu" if interpreted() else "cuda"


def spread(rows, columns, seed, *, dtype=torch.float32):
    """Values over ten decades, so that neighbouring lines have different scales."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-5, 5, (rows, 1), generator=generator)
    across = torch.randint(-3, 3, (columns,), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * 10.0**powers * 10.0**across
    return x.to(dtype).to(DEVICE)


def back(codes, inverse):
    """What codes with a scale for each row stand for."""
    return codes.float() * inverse[:, None]


def bits(x):
    return x.cpu().view(torch.uint8)


@settings(max_examples=8)
@given(rows=st.integers(1, 300), sixteens=st.integers(1, 40), seed=st.integers(0, 99))
def test_lines_along_either_dimension_are_those_of_the_emulation(rows, sixteens, seed):
    x = spread(rows, 16 * sixteens, seed)
    found = quantize_groups(x, E4M3.dtype, "row")
    assert torch.equal(
        back(found.rowwise, found.rowwise_scale_inv)[:rows], quantize(x, E4M3, per="row") + 0.0
    )
    emulated = quantize(x, E4M3, per="column").t() + 0.0
    assert torch.equal(back(found.columnwise, found.columnwise_scale_inv)[:, :rows], emulated)
    padded = -(-rows // 16) * 16
    assert found.rowwise.shape == (padded, x.shape[1])
    assert not found.rowwise[rows:].float().any()
    assert not found.columnwise[:, rows:].float().any()


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [E4M3, E5M2], ids=lambda target: target.name)
@pytest.mark.parametrize("shape", [(1, 16), (150, 80), (144, 528)])
def test_the_kernel_does_what_its_twin_does(shape, target, dtype):
    x = (spread(*shape, 1) / 1e5).to(dtype)
    found = quantize_groups(x, target.dtype, "row")
    expected = _empty(x, target.dtype, "row", True, True)
    _plainly(x, *expected, groups="row", largest=target.largest)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert torch.equal(bits(a), bits(b))


def test_a_layout_that_is_not_asked_for_is_empty_and_changes_nothing_in_the_other():
    x = spread(20, 48, 2)
    both = quantize_groups(x, E4M3.dtype, "row")
    alone = quantize_groups(x, E4M3.dtype, "row", columnwise=False)
    turned = quantize_groups(x, E4M3.dtype, "row", rowwise=False)
    assert (
        alone.columnwise.numel()
        == alone.columnwise_scale_inv.numel()
        == turned.rowwise.numel()
        == 0
    )
    assert torch.equal(bits(alone.rowwise), bits(both.rowwise))
    assert torch.equal(alone.rowwise_scale_inv, both.rowwise_scale_inv)
    assert torch.equal(bits(turned.columnwise), bits(both.columnwise))
    assert torch.equal(turned.columnwise_scale_inv, both.columnwise_scale_inv)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_becomes_nan_and_spoils_the_scale_of_its_line_alone(bad):
    x = spread(32, 64, 3)
    good = quantize_groups(x, E4M3.dtype, "row")
    x[3, 5] = bad
    found = quantize_groups(x, E4M3.dtype, "row")
    assert found.rowwise.float().isnan().nonzero().tolist() == [[3, 5]]
    assert found.columnwise.float().isnan().nonzero().tolist() == [[5, 3]]
    assert found.rowwise_scale_inv[3] == found.columnwise_scale_inv[5] == 1
    others = torch.arange(32, device=DEVICE) != 3
    assert torch.equal(found.rowwise_scale_inv[others], good.rowwise_scale_inv[others])


def test_a_matrix_without_rows_gives_none():
    found = quantize_groups(torch.empty(0, 32, device=DEVICE), E5M2.dtype, "row")
    assert found.rowwise.shape == (0, 32)
    assert found.columnwise.shape == (32, 0)
    assert found.columnwise_scale_inv.tolist() == [1.0] * 32


def test_an_operator_of_the_compiler_gives_the_same():
    x = spread(100, 256, 4, dtype=torch.bfloat16)

    def cast(x):
        return quantize_groups(x, torch.float8_e4m3fn, "row")

    traced = torch.compile(cast, backend="eager", fullgraph=True)
    for a, b in zip(traced(x), cast(x), strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_fake_tensors_have_the_shapes_of_real_ones(rows, columns):
    op, x = torch.ops.narrowcast.quantize_fp8_groups, torch.ones(21, 48)
    real = op(x, E4M3.dtype, "row", rows, columns)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x), E4M3.dtype, "row", rows, columns)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (150, 80)])
def test_factors_of_columns_are_multiplied_on_the_way(shape, dtype):
    x = (spread(*shape, 1) / 1e5).to(dtype)
    factors = 2.0 ** torch.randint(-9, 9, shape[1:]).to(DEVICE)
    found = quantize_groups(x, E5M2.dtype, "row", factors=factors)
    expected = quantize_groups(x.float() * factors, E5M2.dtype, "row")
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(bits(a), bits(b))
