"""Law 1: rounding equals the hardware cast after an explicit clamp, for every bit pattern."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    TF32,
    cast,
    round_stochastic,
    round_to,
)

FORMATS = (TF32, BF16, FP16, E4M3, E5M2, E2M1)
REFERENCE = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
on_each_device = pytest.mark.parametrize("device", DEVICES)
for_each_format = pytest.mark.parametrize("target", FORMATS, ids=lambda each: each.name)
saturating_or_not = pytest.mark.parametrize("saturate", [False, True])


def every_16_bit_pattern():
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    return torch.cat([patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float()])


def every_midpoint(target):
    """Every value of an 8- or 16-bit format, every midpoint, and their neighbours in fp32."""
    dtype = REFERENCE[target.name]
    width = np.dtype(dtype).itemsize
    patterns = np.arange(2 ** (8 * width)).astype(f"uint{8 * width}")
    if target is E2M1:
        patterns = patterns[:16]
    with np.errstate(invalid="ignore"):
        values = patterns.view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    ends = np.array([2 * values[-1] - values[-2], 1.5 * values[-1] - 0.5 * values[-2]])
    exact = np.concatenate([values, middles, ends, -ends])
    with np.errstate(over="ignore"):
        single = exact.astype(np.float32)
    assert (single == exact).all() or target is BF16  # what lies beyond bf16 is infinite in fp32
    below, above = np.nextafter(single, -np.inf), np.nextafter(single, np.inf)
    return torch.from_numpy(np.concatenate([single, below, above]).astype(np.float32))


def structured_patterns():
    """Every exponent and sign with chosen mantissas, and 2**20 random bit patterns."""
    exponents = np.arange(512, dtype=np.uint32) << 23
    edges = [0, 1, 2, 3, 2**23 - 1, 2**23 - 2]
    for bit in range(23):
        step = 2**bit
        edges += [step - 1, step, step + 1, 3 * step - 1, 3 * step, 3 * step + 1]
        edges += [2**23 - step, 2**23 - step - 1, (2**23 - step) ^ 1]
    mantissas = np.unique(np.array(edges) % 2**23).astype(np.uint32)
    chosen = (exponents[:, None] | mantissas[None, :]).ravel()
    drawn = np.random.default_rng(1).integers(0, 2**32, 2**20, dtype=np.uint32)
    return torch.from_numpy(np.concatenate([chosen, drawn]).view(np.float32))


def reference_rounding(x, target, *, saturate):
    """Round fp32 with code that is not ours: ml_dtypes or numpy, and fp64 arithmetic for tf32."""
    x = x.numpy()
    if saturate:
        x = np.clip(x, np.float32(-target.largest), np.float32(target.largest))
    if target is TF32:
        with np.errstate(over="ignore", invalid="ignore"):
            wide = x.astype(np.float64)
            _, exponent = np.frexp(wide)
            step = np.exp2(np.maximum(exponent - 1, -126) - 10)
            return np.copysign(np.rint(wide / step) * step, wide).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(REFERENCE[target.name]).astype(np.float32)
    # e2m1 has no NaN to give; in a wider carrier there is one.
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def assert_same_bits(ours, expected):
    ours = ours.cpu().numpy()
    assert ours.dtype == expected.dtype
    missing = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), missing)
    bits = f"int{8 * ours.itemsize}"
    np.testing.assert_array_equal(ours.view(bits)[~missing], expected.view(bits)[~missing])


@on_each_device
@saturating_or_not
@for_each_format
def test_every_16_bit_pattern_rounds_as_the_reference_does(target, saturate, device):
    x = every_16_bit_pattern()
    ours = round_to(x.to(device), target, saturate=saturate)
    assert_same_bits(ours, reference_rounding(x, target, saturate=saturate))


@on_each_device
@saturating_or_not
@pytest.mark.parametrize("grid", [BF16, FP16, E4M3, E5M2, E2M1], ids=lambda each: each.name)
@for_each_format
def test_midpoints_and_their_neighbours_round_as_the_reference_does(target, grid, saturate, device):
    x = every_midpoint(grid)
    ours = round_to(x.to(device), target, saturate=saturate)
    assert_same_bits(ours, reference_rounding(x, target, saturate=saturate))


@on_each_device
@saturating_or_not
@for_each_format
def test_fp32_patterns_of_every_exponent_round_as_the_reference_does(target, saturate, device):
    x = structured_patterns()
    ours = round_to(x.to(device), target, saturate=saturate)
    assert_same_bits(ours, reference_rounding(x, target, saturate=saturate))


@on_each_device
@pytest.mark.parametrize("target", [BF16, FP16, E4M3, E5M2], ids=lambda each: each.name)
def test_rounding_equals_the_torch_cast_after_a_clamp(target, device):
    x = torch.cat([every_16_bit_pattern(), every_midpoint(target)]).to(device)
    clamped = x.clamp(-target.largest, target.largest)
    expected = clamped.to(target.dtype).float().cpu().numpy()
    assert_same_bits(round_to(x, target, saturate=True), expected)


@on_each_device
@saturating_or_not
@pytest.mark.parametrize("target", [BF16, FP16, E4M3, E5M2], ids=lambda each: each.name)
def test_cast_holds_what_rounding_gives(target, saturate, device):
    x = torch.cat([every_16_bit_pattern(), every_midpoint(target)])
    ours = cast(x.to(device), target, saturate=saturate)
    assert ours.dtype == target.dtype
    assert_same_bits(ours.float(), reference_rounding(x, target, saturate=saturate))


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@for_each_format
def test_every_16_bit_tensor_rounds_as_its_values_do_in_fp32(target, dtype, device):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    expected = torch.from_numpy(reference_rounding(x.float(), target, saturate=False)).to(dtype)
    ours = round_to(x.to(device), target)
    assert ours.dtype == dtype
    assert_same_bits(ours.float(), expected.float().numpy())


@on_each_device
@pytest.mark.parametrize("target", [FP32, *FORMATS], ids=lambda each: each.name)
def test_fp64_is_rounded_once(target, device):
    # Just off a midpoint by less than fp32 sees: by way of fp32, these would become ties.
    base = every_midpoint(target) if target.name in REFERENCE else structured_patterns()
    base = base.double()
    base = base[base.isfinite() & (base.abs() <= target.largest)]
    x = torch.cat([base, base * (1 + 2.0**-40), base * (1 - 2.0**-40)])
    wide = x.numpy()
    _, exponent = np.frexp(wide)
    step = np.exp2(
        np.maximum(exponent - 1, round(math.log2(target.smallest_normal))) - target.mantissa_bits
    )
    expected = np.copysign(np.rint(wide / step) * step, wide)
    expected = np.clip(expected, -target.largest, target.largest)
    assert_same_bits(round_to(x.to(device), target, saturate=True), expected)


any_float = st.floats(width=32)
any_format = st.sampled_from((FP32, *FORMATS))


@given(x=any_float, target=any_format, saturate=st.booleans())
def test_rounding_twice_is_rounding_once(x, target, saturate):
    once = round_to(torch.tensor([x]), target, saturate=saturate)
    assert_same_bits(round_to(once, target, saturate=saturate), once.numpy())


@given(x=any_float, target=any_format, saturate=st.booleans())
def test_rounding_is_odd(x, target, saturate):
    negative = round_to(torch.tensor([-x]), target, saturate=saturate)
    assert_same_bits(-negative, round_to(torch.tensor([x]), target, saturate=saturate).numpy())


@given(
    pair=st.tuples(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False)),
    target=any_format,
)
def test_rounding_keeps_order(pair, target):
    low, high = round_to(torch.tensor(sorted(pair)), target, saturate=True).tolist()
    assert low <= high


@on_each_device
@for_each_format
def test_stochastic_rounding_never_moves_a_value_of_the_format(target, device):
    exact = round_to(structured_patterns(), target)
    ours = round_stochastic(
        exact.to(device), target, generator=torch.Generator(device).manual_seed(0)
    )
    assert_same_bits(ours, exact.numpy())


@on_each_device
@for_each_format
def test_stochastic_rounding_takes_one_of_the_two_neighbours(target, device):
    x = structured_patterns()
    x = x[x.isfinite() & (x.abs() <= target.largest)]
    ours = round_stochastic(
        x.to(device), target, generator=torch.Generator(device).manual_seed(0)
    ).cpu()
    wide = x.double().numpy()
    _, exponent = np.frexp(wide)
    lowest = round(math.log2(target.smallest_normal))
    step = np.exp2(np.maximum(exponent - 1, lowest) - target.mantissa_bits)
    down, up = np.floor(wide / step) * step, np.ceil(wide / step) * step
    assert ((ours.double().numpy() == down) | (ours.double().numpy() == up)).all()


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@for_each_format
def test_stochastic_rounding_is_unbiased(target, dtype, device):
    draws = 2**14
    rest = torch.tensor([0.001, 0.1, 0.25, 0.5, 0.7, 0.999], dtype=dtype)
    # Between the two smallest values and from 1 on, of either sign: (start, step) by row.
    ends = torch.tensor([[target.smallest, target.smallest], [1.0, target.epsilon]], dtype=dtype)
    start, step = torch.cat([ends, -ends]).unsqueeze(-1).expand(-1, -1, len(rest)).unbind(1)
    x = start + step * rest
    share = ((x - start) / step).double()
    generator = torch.Generator(device).manual_seed(3)
    many = x.to(device).expand(draws, *x.shape).contiguous()
    rounded = round_stochastic(many, target, generator=generator).cpu()
    went_up = (rounded != start).double().mean(0)
    # The share of `draws` coin flips strays by five standard deviations once in 1.7 million times;
    # there are 24 here, and a fixed seed. Half a flip stands in for the far tail of rare events.
    allowed = 5 * (share * (1 - share) / draws).sqrt() + 0.5 / draws
    assert ((went_up - share).abs() <= allowed).all()


@for_each_format
def test_stochastic_rounding_repeats_with_its_generator(target):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    first, second = (
        round_stochastic(x, target, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(first, second)


@saturating_or_not
@for_each_format
def test_stochastic_rounding_settles_overflow_as_nearest_does(target, saturate):
    x = torch.tensor([math.inf, -math.inf, math.nan, 4 * target.largest_power, -1.0])
    ours = round_stochastic(
        x, target, generator=torch.Generator().manual_seed(0), saturate=saturate
    )
    assert_same_bits(ours, round_to(x, target, saturate=saturate).numpy())
