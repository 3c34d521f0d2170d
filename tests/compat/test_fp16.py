"""The FP16 trainer's names against torch's scaler, IEEE half precision and plain SGD."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.compat.fp16 import (
    GradScaler,
    MixedPrecisionConfig,
    MixedPrecisionTrainer,
    WeightManager,
    check_fp16_safe,
    fixed_point_f16,
    is_in_range,
    to_fp16,
    would_underflow,
)
from narrowcast.errors import ConfigError

INF, NAN = float("inf"), float("nan")


def test_scale_moves_like_torchs_on_ten_thousand_overflow_patterns():
    rng = random.Random(0)
    for _ in range(10_000):
        interval = rng.choice([1, 2, 3, 5])
        growth, backoff = rng.choice([2.0, 4.0]), rng.choice([0.5, 0.25])
        ours = GradScaler(
            MixedPrecisionConfig(
                initial_scale=1024.0, scale_growth_factor=growth, scale_backoff_factor=backoff,
                growth_interval=interval, min_scale=2.0**-60, max_scale=2.0**100,
            )
        )  # fmt: skip
        theirs, finite_steps = torch.tensor(1024.0), torch.zeros((), dtype=torch.int32)
        for _ in range(8):
            found_inf = rng.random() < 0.3
            # The operation that torch.amp.GradScaler.update() calls.
            torch._amp_update_scale_(
                theirs, finite_steps, torch.tensor(float(found_inf)), growth, backoff, interval
            )
            assert ours.update(found_inf).new == theirs.item()


def test_default_scale_doubles_halves_and_doubles_again():
    scaler = GradScaler()
    changes = [
        status
        for found_inf in [*[False] * 2000, True, *[False] * 2000]
        if (status := scaler.update(found_inf)).kind != "no update"
    ]
    assert changes == [
        ("increased", 65536.0, 131072.0),
        ("decreased", 131072.0, 65536.0),
        ("increased", 65536.0, 131072.0),
    ]


def test_bounds_hold_and_are_reported_as_decided():
    low = GradScaler(MixedPrecisionConfig(initial_scale=8.0, min_scale=1.0))
    assert [low.update(True).new for _ in range(10)] == [4.0, 2.0, 1.0, *[1.0] * 7]
    assert low.update(True) == ("decreased", 1.0, 1.0)
    high = GradScaler(MixedPrecisionConfig(initial_scale=2.0**17, growth_interval=1))
    assert [high.update(False).new for _ in range(3)] == [2.0**18] * 3
    assert high.update(False) == ("increased", 2.0**18, 2.0**18)


def test_static_scale_never_moves():
    scaler = GradScaler(MixedPrecisionConfig(dynamic_scaling=False))
    assert {scaler.update(found_inf).kind for found_inf in (True, False)} == {"no update"}
    assert scaler.scale == 65536.0


def test_reset_returns_to_the_initial_scale_and_count():
    scaler = GradScaler(MixedPrecisionConfig(growth_interval=3))
    scaler.update(True)
    scaler.update(False)
    scaler.reset()
    assert [scaler.update(False).new for _ in range(3)] == [65536.0, 65536.0, 131072.0]


def test_gradient_of_1e_8_is_kept_by_the_scale_and_lost_without():
    scaler = GradScaler()
    gradient = torch.tensor([1e-8])
    assert to_fp16(gradient).item() == 0.0
    [unscaled] = scaler.unscale([to_fp16(scaler.scale_loss(gradient))])
    assert unscaled.item() == pytest.approx(1e-8, rel=1e-3)
    assert not scaler.check_finite_gradients([gradient, torch.tensor([1.0, NAN])])


def test_small_updates_are_kept_by_master_weights_and_lost_without():
    weight, gradient = torch.ones(4), torch.full((4,), 1.0)
    kept = WeightManager([weight])
    lost = WeightManager([weight], use_master=False)
    for _ in range(100):
        kept.update([gradient], lr=1e-4)
        lost.update([gradient], lr=1e-4)
    assert torch.equal(kept.weights[0], torch.full((4,), 0.99).half())
    assert torch.equal(lost.weights[0], weight.half())
    kept.master_weights[0].fill_(0.5)
    kept.sync()
    assert torch.equal(kept.weights[0], torch.full((4,), 0.5).half())


def test_range_checks_follow_ieee_half_precision():
    x = torch.tensor([65504.0, 65520.0, 1e-5, 6.1e-5, 5.9e-8, 0.0, NAN, INF, -INF])
    assert is_in_range(x).tolist() == [True, False, True, True, True, True, False, False, False]
    assert would_underflow(x).tolist() == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert check_fp16_safe(torch.tensor([1.0, -2.0])) == (False, False)
    assert check_fp16_safe(torch.tensor([1e6, 1e-6])) == (True, True)


@given(st.floats(width=32))
def test_conversion_is_a_half_cast_after_a_clamp(value):
    x = torch.tensor([value])
    torch.testing.assert_close(
        to_fp16(x), x.clamp(-65504, 65504).half(), rtol=0, atol=0, equal_nan=True
    )


def test_fixed_point_numbers_are_those_of_the_original():
    x = torch.tensor([1e-4, 0.3, 1000.1, -0.3, 1e9, INF], dtype=torch.float64)
    expected = [0.0, 307 / 1024, 1024102 / 1024, -307 / 1024, 65504.0, 65504.0]
    assert fixed_point_f16(x).tolist() == expected


def make_regression(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 8, generator=generator)
    return inputs, inputs @ torch.randn(8, 1, generator=generator)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)


def train(steps, **settings):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = MixedPrecisionConfig(initial_scale=1024.0, **settings)
    trainer = MixedPrecisionTrainer(model, optimizer, config)
    inputs, targets = make_regression()
    return [trainer.train_step(inputs, targets) for _ in range(steps)]


def test_trainer_follows_a_plain_fp32_loop():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = make_regression()
    expected = []
    for _ in range(20):
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    # Sums of 8 products with operands of 11 bits.
    assert train(20) == pytest.approx(expected, rel=2e-2)
    assert train(20, enabled=False) == expected


def test_statistics_count_overflows_and_the_scale_comes_down():
    model = make_model()
    trainer = MixedPrecisionTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        MixedPrecisionConfig(initial_scale=1024.0, growth_interval=2),
    )
    inputs, targets = make_regression()
    before = model.weight.detach().clone()
    assert trainer.train_step(inputs * INF, targets) != trainer.train_step(inputs, targets)
    trainer.train_step(inputs, targets)
    stats = trainer.stats()
    assert (stats.total_steps, stats.overflow_count) == (3, 1)
    assert stats.overflow_rate == pytest.approx(1 / 3)
    assert (stats.scale_decreases, stats.scale_increases) == (1, 1)
    assert stats.current_scale == trainer.current_scale == 1024.0
    assert stats.avg_grad_norm > 0
    assert not torch.equal(model.weight, before)
    trainer.reset()
    assert trainer.stats().total_steps == 0


def test_presets_differ_in_start_and_growth():
    gentle, fast = MixedPrecisionConfig.conservative(), MixedPrecisionConfig.aggressive()
    assert (gentle.initial_scale, gentle.growth_interval) == (32768.0, 5000)
    assert (fast.initial_scale, fast.growth_interval) == (131072.0, 1000)


def test_unchecked_gradients_and_odd_factors_raise():
    with pytest.raises(ConfigError, match="check_finite"):
        MixedPrecisionConfig(check_finite=False)
    with pytest.raises(ConfigError, match="growth_factor"):
        MixedPrecisionConfig(scale_growth_factor=1.5)
