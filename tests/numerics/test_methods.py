import math

import pytest
import torch

from narrowcast.numerics import BF16, E2M1, E4M3, E5M2, FP16, TF32, round_to
from narrowcast.numerics.methods import (
    DOUBLE,
    SINGLE,
    by_adding,
    by_bits,
    by_casting,
    by_steps,
    in_pieces,
    overflows,
)

for_each_range = pytest.mark.parametrize("saturate", [False, True])


@pytest.fixture(scope="module")
def patterns():
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (2**17,), generator=generator, dtype=torch.int64)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    return torch.cat([bits.to(torch.int32).view(torch.float32), halves.view(torch.float16).float()])


def run(method, x, scratch):
    return in_pieces(x, method, scratch=scratch, dtype=x.dtype)


def same(a, b):
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30)) and torch.equal(
        a.isnan(), b.isnan()
    )


@for_each_range
@pytest.mark.parametrize("target", [FP16, E4M3, E5M2], ids=lambda each: each.name)
def test_adding_and_casting_round_alike(target, saturate, patterns):
    limit = target.largest if saturate else None
    added = run(by_adding(target, SINGLE, limit=limit), patterns, torch.int32)
    assert same(added, run(by_casting(target, limit=limit), patterns, target.dtype))


@for_each_range
@pytest.mark.parametrize("carrier", [SINGLE, DOUBLE], ids=["fp32", "fp64"])
@pytest.mark.parametrize("target", [FP16, E4M3, E5M2, E2M1], ids=lambda each: each.name)
def test_adding_and_stepping_round_alike_to_the_sign_of_zero(target, carrier, saturate, patterns):
    limit = target.largest if saturate or target is E2M1 else None
    x = patterns.to(carrier.float_dtype)
    added, stepped = (
        run(method(target, carrier, limit=limit), x, carrier.int_dtype)
        for method in (by_adding, by_steps)
    )
    assert same(added, stepped)
    assert torch.equal(added.signbit()[~x.isnan()], stepped.signbit()[~x.isnan()])


@for_each_range
def test_bits_and_casting_round_alike(saturate, patterns):
    limit = BF16.largest if saturate else None
    shifted = run(by_bits(BF16, SINGLE, limit=limit), patterns, torch.float32)
    assert same(shifted, run(by_casting(BF16, limit=limit), patterns, torch.bfloat16))


@for_each_range
def test_bits_in_fp32_and_adding_in_fp64_round_alike(saturate, patterns):
    limit = TF32.largest if saturate else None
    shifted = run(by_bits(TF32, SINGLE, limit=limit), patterns, torch.float32)
    added = run(by_adding(TF32, DOUBLE, limit=limit), patterns.double(), torch.int64)
    assert same(shifted.double(), added)


@pytest.mark.parametrize("scale", [2.0**-40, 0.5, 1.0, 8.0, 2.0**40])
@pytest.mark.parametrize("target", [FP16, E4M3, E5M2, E2M1], ids=lambda each: each.name)
def test_an_absorbed_scale_equals_scaling_before_and_after(target, scale, patterns):
    x = patterns[(patterns.abs() * scale <= target.largest) & (patterns.abs() * scale > 1e-30)]
    absorbed = run(by_adding(target, SINGLE, limit=None, scale=scale), x, torch.int32)
    assert torch.equal(absorbed, round_to(x * scale, target) / scale)


@pytest.mark.parametrize("target", [TF32, BF16, FP16, E4M3, E5M2], ids=lambda each: each.name)
def test_what_overflows_is_what_rounds_to_no_number(target, patterns):
    edge = torch.tensor([target.overflow])
    x = torch.cat([patterns, edge, edge.nextafter(torch.zeros(1)), edge.nextafter(edge * 2)])
    x = x[x.isfinite()]
    assert torch.equal(overflows(x.abs(), target), ~round_to(x, target).isfinite())


def test_nothing_overflows_a_format_that_reaches_beyond_the_dtype():
    x = torch.tensor([65504.0, math.inf], dtype=torch.float16)
    assert not overflows(x, BF16).any()
