"""Shares and signal of samples, against numpy, ml_dtypes and counting one tensor at a time."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.health.statistics.sampling import SAMPLE, Offsets, sample
from narrowcast.health.statistics.statistics import (
    COLUMNS,
    RUN,
    exponent_counts,
    statistics,
    trimmed,
    what_if,
)
from narrowcast.numerics import BF16, E4M3, E5M2, FP16, FP32, cast_loss, quantize, snr_db

THEIRS = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}

OFFSETS = Offsets(torch.device("cpu"))


def spread(rows, columns=512, *, seed=0, decades=6):
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-decades, decades, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * 10.0**powers


def column(found, name):
    return found[:, COLUMNS.index(name)]


@pytest.mark.parametrize("target", [FP16, BF16, E4M3, E5M2, FP32], ids=lambda f: f.name)
@settings(max_examples=15)
@given(seed=st.integers(0, 999), decades=st.integers(1, 12))
def test_shares_are_those_of_each_tensor_by_itself(target, seed, decades):
    x = spread(5, seed=seed, decades=decades)
    x[1, 3], x[2, 5], x[4] = math.inf, math.nan, 0.0
    found = statistics(x, target)
    for row, numbers in zip(x, found, strict=True):
        loss = cast_loss(row, target)
        told = dict(zip(COLUMNS, numbers.tolist(), strict=True))
        assert told["overflow"] * 512 == pytest.approx(loss.overflowed, abs=1e-3)
        assert told["underflow"] * 512 == pytest.approx(loss.flushed, abs=1e-3)
        assert told["nonfinite"] * 512 == pytest.approx(loss.nonfinite, abs=1e-3)
        good = row[row.isfinite()].abs()
        assert told["amax"] == (good.max().item() if loss.nonfinite == 0 else math.inf)
        above = good[good > 0]
        assert told["amin"] == (above.min().item() if above.numel() else 0.0)


@pytest.mark.parametrize("target", [FP16, E4M3, E5M2], ids=lambda f: f.name)
def test_what_keeps_only_some_of_its_digits_is_what_ml_dtypes_makes_subnormal(target):
    x = spread(3, decades=9).clamp(-400, 400)
    as_theirs = x.numpy().astype(THEIRS[target.name]).astype(np.float32)
    kept = (as_theirs != 0) & (np.abs(x.numpy()) < target.smallest_normal)
    assert torch.equal(
        column(statistics(x, target), "subnormal"), torch.from_numpy(kept).float().mean(1)
    )


@pytest.mark.parametrize("target", [E4M3, E5M2], ids=lambda f: f.name)
def test_the_signal_is_that_of_the_scaled_cast(target):
    x = spread(4, decades=2)
    found = column(statistics(x, target, scaling="tensor"), "snr_db")
    for row, told in zip(x, found, strict=True):
        assert told.item() == pytest.approx(float(snr_db(row, quantize(row, target))), abs=0.01)
    by_blocks = column(statistics(x, target, scaling="block"), "snr_db")
    for row, told in zip(x, by_blocks, strict=True):
        exact = quantize(row, target, per="block", block=RUN)
        assert told.item() == pytest.approx(float(snr_db(row, exact)), abs=0.01)
    assert (by_blocks >= found - 0.01).all()


def test_nothing_lost_and_nothing_there_have_no_signal_to_tell():
    found = statistics(torch.stack([torch.ones(128), torch.zeros(128)]), E4M3)
    assert column(found, "snr_db").isnan().all()
    assert not found[:, 2:6].any()


def test_what_if_says_whether_another_format_would_lose_anything():
    powers = 2.0 ** torch.arange(-10.0, 7.0).repeat(1, 8)
    assert column(what_if(powers, "e4m3"), "underflow").item() == 0  # 17 binary digits apart
    wide = 2.0 ** torch.arange(-20.0, 12.0).repeat(1, 4)
    assert column(what_if(wide, "e4m3"), "underflow").item() > 0.3
    assert column(what_if(wide, "bf16"), "underflow").item() == 0
    assert column(what_if(wide * 2.0**10, "fp16"), "overflow").item() > 0.1
    assert column(what_if(wide, "mxfp8"), "overflow").item() == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 999))
def test_exponents_are_counted_as_numpy_counts_them(seed):
    x = spread(2, seed=seed)
    x[:, 0], x[:, 1], x[0, 2] = 0.0, math.inf, 2.0**-149
    for row, counted in zip(x, exponent_counts(x, FP32), strict=True):
        lowest, counts = trimmed(counted.tolist())
        values = row[(row != 0) & row.isfinite()].double().numpy()
        powers = np.floor(np.log2(np.abs(values))).astype(int)
        assert lowest == powers.min()
        assert list(counts) == np.bincount(powers - powers.min()).tolist()
    assert trimmed(exponent_counts(torch.zeros(1, 5), FP32)[0].tolist()) == (0, ())


def test_exponents_are_counted_after_the_scale():
    x = torch.tensor([[3.0, 0.7, 0.1]])
    scaled = exponent_counts(x, E4M3, scaling="tensor")[0].tolist()
    assert trimmed(scaled)[0] == math.floor(math.log2(0.1 * 128))  # 3 · 128 is within 448


@settings(max_examples=40)
@given(shape=st.lists(st.integers(1, 300), min_size=1, max_size=3))
def test_a_sample_is_of_one_size_and_spread_over_the_whole_tensor(shape):
    x = torch.arange(math.prod(shape)).view(shape)
    for offsets in (OFFSETS.single, OFFSETS.runs):
        taken = sample(x, offsets)
        assert taken.shape == (SAMPLE,)
        if x.numel() <= SAMPLE:
            counts = taken.bincount(minlength=x.numel())
            assert counts.min() >= SAMPLE // x.numel()
        gaps = torch.cat([torch.tensor([0]), taken.unique(), torch.tensor([x.numel()])]).diff()
        assert gaps.max() <= 2 * x.numel() / len(offsets) + RUN


LAYOUTS = {
    "one position of every row": lambda batch: token_mask(batch, 33, 16, positions=[0]),
    "a few positions, wide rows": lambda batch: token_mask(batch, 64, 128, positions=[3, 9, 40]),
    "the end of every row": lambda batch: token_mask(batch, 27, 256, positions=range(21, 27)),
    "one column": lambda batch: token_mask(batch, 16, 256, columns=[7]),
    "a block of columns": lambda batch: token_mask(batch, 50, 96, columns=range(24)),
    "channels first": lambda batch: token_mask(batch, 40, 48, positions=[1, 2]).transpose(1, 2),
}


def token_mask(batch, length, width, *, positions=None, columns=None):
    x = torch.zeros(batch, length, width)
    x[:, slice(None) if positions is None else list(positions)] = 1.0
    if columns is not None:
        x.zero_()[:, :, list(columns)] = 1.0
    return x


@pytest.mark.sampled(times=3)
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 27, 31, 32, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_estimates_the_share_of_any_layout_at_any_batch_size(layout, batch):
    x = LAYOUTS[layout](batch)
    true, offsets, readings = x.mean().item(), Offsets(x.device, seed=1), 40
    shares = {1: [], RUN: []}
    for step in range(readings):
        offsets.draw(step)
        shares[1].append(sample(x, offsets.single).mean().item())
        shares[RUN].append(sample(x, offsets.runs).mean().item())
    for run, told in shares.items():
        # Of independent single values, or of independent runs of equal ones: parts do no worse.
        error = math.sqrt(true * (1 - true) / (SAMPLE / run))
        assert abs(np.mean(told) - true) < 4 * error / math.sqrt(readings) + 1e-6
        assert max(abs(each - true) for each in told) < 5 * error + 1e-6


@pytest.mark.parametrize("batch", [1, 16, 32, 100])
def test_statistics_of_a_sample_are_those_of_the_tensor_within_the_error_of_sampling(batch):
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 32, 128, generator=generator)
    x *= 10.0 ** torch.randint(-4, 1, (32, 1), generator=generator)  # by position
    x[:, 0] = 0.0
    whole = statistics(x.view(1, -1), E5M2, scaling="tensor")[0]
    offsets = Offsets(x.device)
    for step in range(5):
        offsets.draw(step)
        told = statistics(sample(x, offsets.single).view(1, -1), E5M2, scaling="tensor")[0]
        for name in ("underflow", "subnormal"):
            true, mine = (each[COLUMNS.index(name)].item() for each in (whole, told))
            assert abs(mine - true) < 5 * math.sqrt(max(true, 1e-3) / SAMPLE)
        at = COLUMNS.index("snr_db")
        assert told[at].item() == pytest.approx(whole[at].item(), abs=1.0)


def test_offsets_depend_on_nothing_but_the_seed_and_the_step():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other = (Offsets(torch.device("cpu"), seed=5) for _ in range(2))
    one.draw(3)
    other.draw(7)
    assert not torch.equal(one.single, other.single)
    other.draw(3)
    assert torch.equal(one.single, other.single)
    assert torch.equal(one.runs, other.runs)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one.single, Offsets(torch.device("cpu"), seed=3).single)


def test_a_block_of_neighbours_is_sampled_whole():
    for shape in ((64, 256), (300, 300)):  # of which the second ends within a block
        runs = sample(torch.arange(math.prod(shape)), OFFSETS.runs).view(-1, RUN)
        assert ((runs - runs[:, :1]) % math.prod(shape) == torch.arange(RUN)).all()
    assert (sample(torch.arange(2**16), OFFSETS.runs)[::RUN] % RUN == 0).all()
