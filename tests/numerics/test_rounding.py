import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast.errors import UnsupportedError
from narrowcast.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    MXFP8,
    NVFP4,
    TF32,
    cast,
    cast_counts,
    quantize,
    round_blocks,
    round_stochastic,
    round_to,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
FORMATS = [FP32, TF32, BF16, FP16, E4M3, E5M2, E2M1]
inf, nan = math.inf, math.nan


# By hand from the OCP 8-bit specification's tables of values, its conversion rules, and IEEE 754.
@pytest.mark.parametrize(
    ("target", "x", "rounded", "saturated"),
    [
        (E4M3, 464.0, 448.0, 448.0),
        (E4M3, 464.1, nan, 448.0),
        (E4M3, -inf, nan, -448.0),
        (E4M3, 0.0009765625, 0.0, 0.0),
        (E4M3, 0.001, 0.001953125, 0.001953125),
        (E5M2, 61439.0, 57344.0, 57344.0),
        (E5M2, 61440.0, inf, 57344.0),
        (E5M2, -inf, -inf, -57344.0),
        (E2M1, 2.5, 2.0, 2.0),
        (E2M1, -1e9, -6.0, -6.0),
        (E2M1, inf, 6.0, 6.0),
        (FP16, 65519.0, 65504.0, 65504.0),
        (FP16, 65520.0, inf, 65504.0),
        (BF16, 1.00390625, 1.0, 1.0),
        (BF16, 1.01171875, 1.015625, 1.015625),
        (TF32, 1.00048828125, 1.0, 1.0),
        (TF32, 3.4028e38, inf, TF32.largest),
        (FP32, inf, inf, FP32.largest),
    ],
)
def test_single_values_round_as_the_specifications_say(target, x, rounded, saturated):
    ours = [float(round_to(torch.tensor(x), target, saturate=each)) for each in (False, True)]
    assert ours == pytest.approx([rounded, saturated], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("target", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("saturate", [False, True])
def test_nan_stays_nan(target, saturate):
    # Quiet and signalling, with every payload that a carry could turn into an infinity.
    payloads = torch.cat([torch.arange(1, 2**14), 2**23 - torch.arange(1, 2**14)])
    bits = torch.cat([payloads + 0x7F800000, payloads - 0x00800000]).to(torch.int32)
    x = bits.view(torch.float32)
    assert x.isnan().all()
    assert round_to(x, target, saturate=saturate).isnan().all()
    generator = torch.Generator().manual_seed(0)
    assert round_stochastic(x, target, generator=generator, saturate=saturate).isnan().all()


def test_a_format_wider_than_the_tensor_changes_nothing_and_copies_nothing():
    x = torch.randn(4).bfloat16()
    assert round_to(x, FP32).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "target", "largest"),
    [
        (torch.bfloat16, FP16, 65280.0),
        (torch.float16, BF16, 65280.0),
        (torch.bfloat16, FP32, (2 - 2.0**-7) * 2.0**127),
    ],
)
def test_saturation_stays_within_what_the_dtype_can_hold(dtype, target, largest):
    x = torch.tensor([inf, torch.finfo(dtype).max], dtype=dtype)
    assert round_to(x, target, saturate=True).tolist() == [largest, largest]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("target", FORMATS[:-1], ids=lambda each: each.name)
def test_a_cast_equals_rounding_in_fp64(target, dtype, saturate):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2000, generator=generator, dtype=torch.float64)
    x = x * torch.exp2(torch.randint(-30, 30, x.shape, generator=generator))
    x = torch.cat([x, torch.tensor([inf, -inf, nan, -0.0], dtype=torch.float64)]).to(dtype)
    ours = cast(x, target, saturate=saturate)
    expected = round_to(x.double(), target, saturate=saturate)
    assert ours.dtype == target.dtype
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_cast_without_a_dtype_is_refused():
    with pytest.raises(UnsupportedError, match=r"no dtype for single e2m1 values.*Use round_to"):
        cast(torch.ones(2), E2M1, saturate=True)


def blocks_of(x, block):
    padded = np.pad(x, [(0, 0), (0, -x.shape[-1] % block)])
    return padded.reshape(x.shape[0], -1, block)


def mxfp8_reference(x, *, saturate):
    """The conversion of the OCP microscaling specification, section 6.3, with ml_dtypes' e8m0."""
    blocks = blocks_of(x, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.frexp(np.maximum(amax, np.finfo(np.float32).tiny))[1] - 1 - 8
    scale = np.exp2(np.clip(exponent, -127, 127).astype(np.float64)).astype(np.float32)
    scale = scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    scaled = blocks / scale
    if saturate:
        scaled = np.clip(scaled, -448, 448)
    with np.errstate(over="ignore", invalid="ignore"):
        elements = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (elements * scale).reshape(x.shape[0], -1)[:, : x.shape[1]]


def nvfp4_reference(x):
    """Block scales in e4m3 under one fp32 scale that spreads them over all of e4m3."""
    blocks = blocks_of(x, 16)
    amax = np.abs(blocks).max(-1, keepdims=True)
    whole = np.float32(amax.max() / np.float32(6 * 448))
    block_scale = (amax / (whole * np.float32(6))).astype(ml_dtypes.float8_e4m3fn)
    smallest = np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).smallest_subnormal)
    scale = np.maximum(block_scale.astype(np.float32), smallest) * whole
    elements = (blocks / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (elements * scale).reshape(x.shape[0], -1)[:, : x.shape[1]]


def spread(rows, columns):
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))
    x[0] = 0
    x[1, 5:] = 0
    return x


@on_each_device
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (50, 45), (3000, 96)])
def test_mxfp8_is_what_the_microscaling_specification_gives(shape, saturate, device):
    x = spread(*shape)
    ours = round_blocks(x.to(device), MXFP8, saturate=saturate).cpu().numpy()
    np.testing.assert_array_equal(ours, mxfp8_reference(x.numpy(), saturate=saturate))


def test_mxfp8_reaches_from_the_smallest_to_the_largest_fp32():
    tiny, huge = torch.full((1, 32), 2.0**-149), torch.full((1, 32), FP32.largest)
    for x in (tiny, huge):
        expected = mxfp8_reference(x.numpy(), saturate=True)
        np.testing.assert_array_equal(round_blocks(x, MXFP8).numpy(), expected)


@on_each_device
@pytest.mark.parametrize("shape", [(64, 128), (50, 45), (3000, 96)])
def test_nvfp4_is_what_its_two_scales_give(shape, device):
    x = spread(*shape)
    ours = round_blocks(x.to(device), NVFP4).cpu().numpy()
    np.testing.assert_array_equal(ours, nvfp4_reference(x.numpy()))


@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("target", [MXFP8, NVFP4], ids=lambda each: each.name)
def test_one_bad_value_spoils_its_block_and_no_other(target, bad):
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    x[0, 3] = bad
    ours = round_blocks(x, target)
    assert ours[0, : target.block].isnan().all()
    assert ours[0, target.block :].isfinite().all()
    assert ours[1].isfinite().all()


@pytest.mark.parametrize("target", [MXFP8, NVFP4], ids=lambda each: each.name)
@pytest.mark.parametrize("x", [torch.zeros(2, 40), torch.zeros(3, 0)], ids=["zeros", "empty"])
def test_nothing_stays_nothing_in_blocks(target, x):
    assert torch.equal(round_blocks(x, target), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_keep_the_dtype_of_the_tensor(dtype):
    x = spread(8, 64).to(dtype)
    expected = torch.from_numpy(mxfp8_reference(x.float().numpy(), saturate=True))
    assert torch.equal(round_blocks(x, MXFP8), expected.to(dtype))


COMPILED = {
    **{f"round_to {each.name}": (lambda x, t=each: round_to(x, t)) for each in FORMATS},
    "saturating": lambda x: round_to(x, E4M3, saturate=True),
    "cast": lambda x: cast(x, E4M3, saturate=False).float(),
    "blocks": lambda x: round_blocks(x, NVFP4),
    "per tensor": lambda x: quantize(x, E4M3, per="tensor"),
    "per row": lambda x: quantize(x, E5M2, per="row"),
    "per block": lambda x: quantize(x, E4M3, per="block", block=16),
    "counts": lambda x: cast_counts(x, E4M3),
}


def awkward(device):
    x = spread(60, 50) * 30
    x[7, 3], x[8, 4], x[9, 5] = inf, -inf, nan
    return x.to(device)


@pytest.mark.parametrize("name", COMPILED)
def test_a_traced_function_gives_what_the_eager_one_gives(name):
    torch.compiler.reset()
    function = COMPILED[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    whole = awkward("cpu")
    for x in (whole, whole.t(), whole.bfloat16().t()):
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_kernel_gives_what_the_eager_kernels_give(name):
    torch.compiler.reset()
    function = COMPILED[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    x = awkward("cuda")
    torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0, equal_nan=True)
