import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    MXFP8,
    NVFP4,
    TF32,
    format_named,
)

REFERENCE = [
    (FP32, np.finfo(np.float32)),
    (BF16, ml_dtypes.finfo(ml_dtypes.bfloat16)),
    (FP16, np.finfo(np.float16)),
    (E4M3, ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)),
    (E5M2, ml_dtypes.finfo(ml_dtypes.float8_e5m2)),
    (E2M1, ml_dtypes.finfo(ml_dtypes.float4_e2m1fn)),
]


@pytest.mark.parametrize(("ours", "info"), REFERENCE, ids=lambda each: getattr(each, "name", ""))
def test_a_format_has_the_range_and_spacing_of_the_reference(ours, info):
    assert ours.bits == info.bits
    assert ours.largest == float(info.max)
    assert ours.smallest_normal == float(info.smallest_normal)
    assert ours.smallest == float(info.smallest_subnormal)
    assert ours.epsilon == float(info.eps)
    assert ours.bias == 1 - int(info.minexp)


@pytest.mark.parametrize("ours", [FP32, BF16, FP16, E4M3, E5M2], ids=lambda each: each.name)
def test_a_format_agrees_with_its_torch_dtype(ours):
    info = torch.finfo(ours.dtype)
    assert (ours.bits, ours.bytes) == (info.bits, info.bits / 8)
    assert (ours.largest, ours.epsilon) == (info.max, info.eps)
    assert torch.tensor(math.inf).to(ours.dtype).float().isinf().item() == ours.has_infinity


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16():
    assert TF32.bits == 19
    assert TF32.smallest_normal == FP32.smallest_normal
    assert TF32.epsilon == FP16.epsilon
    assert TF32.bytes == FP32.bytes


def test_half_a_byte_stores_e2m1():
    assert E2M1.bytes == 0.5


@pytest.mark.parametrize(
    ("ours", "dtype"),
    [
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E5M2, ml_dtypes.float8_e5m2),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_overflow_begins_where_the_reference_leaves_its_range(ours, dtype):
    at = np.float32(ours.overflow)
    with np.errstate(over="ignore"):
        tie, above, below = (
            np.isfinite(each.astype(dtype).astype(np.float32))
            for each in (at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(0)))
        )
    assert (below, tie, above) == (True, not ours.overflow_is_even, False)


def test_only_e2m1_always_saturates():
    plain = [each for each in FORMATS.values() if each not in (MXFP8, NVFP4)]
    assert [each.name for each in plain if each.always_saturates] == ["e2m1"]


def test_a_block_format_counts_its_scales():
    assert (MXFP8.bits, NVFP4.bits) == (8.25, 4.5)
    assert NVFP4.bytes == 4.5 / 8


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_found_by_its_name(name):
    assert format_named(name).name == name


@pytest.mark.parametrize(("wrong", "meant"), [("fp8_e4m3", "e4m3"), ("BF16", "bf16")])
def test_a_misspelt_format_is_refused_with_a_suggestion(wrong, meant):
    with pytest.raises(ConfigError, match=f"{wrong}. Did you mean {meant}"):
        format_named(wrong)


def test_a_hopeless_name_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="Write one of fp32, tf32, bf16"):
        format_named("xyzzy")
