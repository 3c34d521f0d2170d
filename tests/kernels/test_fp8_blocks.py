import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.kernels.fp8_groups import BLOCK, _empty, _plainly, quantize_groups
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics import E4M3, E5M2, quantize

DEVICE = "cpu" if interpreted() else "cuda"


def spread(rows, columns, seed):
    """Values over ten decades, so that neighbouring blocks have different scales."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-5, 5, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * 10.0**powers).to(DEVICE)


def back(codes, inverse):
    """What blocks of 1 × 128 stand for."""
    blocks = codes.float().view(codes.shape[0], -1, BLOCK)
    return (blocks * inverse.t()[..., None]).view(codes.shape)


@settings(max_examples=8)
@given(rows=st.integers(1, 300), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_blocks_along_either_dimension_are_those_of_the_emulation(rows, blocks, seed):
    x = spread(rows, blocks * BLOCK, seed)
    found = quantize_groups(x, torch.float8_e4m3fn, "block")
    assert torch.equal(
        back(found.rowwise, found.rowwise_scale_inv)[:rows],
        quantize(x, E4M3, per="block", block=BLOCK),
    )
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % BLOCK))
    emulated = quantize(padded.t().contiguous(), E4M3, per="block", block=BLOCK)
    assert torch.equal(back(found.columnwise, found.columnwise_scale_inv), emulated)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [E4M3, E5M2], ids=lambda target: target.name)
@pytest.mark.parametrize("groups", ["block", "square"])
def test_the_kernel_does_what_its_twin_does(groups, target, dtype):
    x = (spread(256 if groups == "square" else 150, 384, 1) / 1e3).to(dtype)
    found = quantize_groups(x, target.dtype, groups)
    expected = _empty(x, target.dtype, groups, True, True)
    for scales in expected[2:]:
        scales.fill_(1)
    _plainly(x, *expected, groups=groups, largest=target.largest)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_square_has_one_scale_whichever_way_it_is_read():
    x = spread(256, 384, 2)
    found = quantize_groups(x, torch.float8_e4m3fn, "square")
    assert torch.equal(found.rowwise.view(torch.uint8).t(), found.columnwise.view(torch.uint8))
    assert torch.equal(found.rowwise_scale_inv[:, :3].t(), found.columnwise_scale_inv[:, :2])
    assert found.rowwise_scale_inv.shape[1] % 4 == 0  # as cuBLAS reads them


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_spoils_itself_and_is_not_hidden(bad):
    x = torch.ones(128, 256, device=DEVICE)
    x[3, 5] = bad
    found = quantize_groups(x, torch.float8_e4m3fn, "block")
    assert found.rowwise.float().isnan().nonzero().tolist() == [[3, 5]]
    assert found.columnwise.float().isnan().nonzero().tolist() == [[5, 3]]


def test_an_operator_of_the_compiler_gives_the_same():
    x = spread(100, 256, 3)

    def cast(x):
        return quantize_groups(x, torch.float8_e4m3fn, "block")

    traced = torch.compile(cast, backend="eager", fullgraph=True)
    for a, b in zip(traced(x), cast(x), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
