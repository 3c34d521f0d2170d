"""Scales from the past, against powers of two found by exact arithmetic."""

import math

import pytest
import torch

from narrowcast.kernels.fp8 import quantize
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.fp8.delayed import LENGTH, AmaxHistories
from narrowcast.precision.plan.module_plan import OPERANDS
from narrowcast.precision.plan.policy import PRESETS
from narrowcast.precision.products.operands import ProductFormats

DEVICE = torch.device("cpu" if interpreted() else "cuda")
FORMATS = ProductFormats.of(PRESETS["fp8-delayed"])
TARGETS = dict(
    zip(OPERANDS, (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2), strict=True)
)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def histories(modules=1):
    return AmaxHistories([FORMATS] * modules, DEVICE)


def told(finite):
    return torch.tensor(finite, device=DEVICE)


def matrix(amax):
    return torch.full((1, 16), float(amax), device=DEVICE)


def meet(history, role, amax):
    return quantize(
        matrix(amax),
        TARGETS[role],
        scale_inv=history.scale_inv(role),
        cast_stats=history.cast_stats(role),
    )


def largest_inverse(amax, largest):
    """The smallest power of two that brings `amax` within `largest`, by trying all of them."""
    return next(2.0**n for n in range(-126, 127) if amax / 2.0**n <= largest)


@pytest.mark.parametrize("role", OPERANDS)
def test_the_scale_of_a_step_keeps_the_largest_of_the_last_sixteen(role):
    whole = histories()
    history, past = whole.of(0), []
    generator = torch.Generator().manual_seed(0)
    for step in range(3 * LENGTH):
        amax = 2.0 ** (10 * math.sin(step / 7)) * (1 + torch.rand(1, generator=generator).item())
        in_force = history.scale_inv(role).item()
        meet(history, role, amax)
        if past:
            assert history.scale_inv(role).item() == in_force  # within a step it stays
        past.append(matrix(amax)[0, 0].item())
        whole.advance(told(True))
        expected = largest_inverse(max(past[-LENGTH:]), LARGEST[TARGETS[role]])
        assert history.scale_inv(role).item() == expected
    assert len(set(past[-LENGTH:])) == LENGTH


def test_a_peak_is_forgotten_after_sixteen_steps_and_not_before():
    whole = histories()
    history = whole.of(0)
    peak, calm = largest_inverse(1024.0, 448), largest_inverse(1.0, 448)
    found = []
    for step in range(LENGTH + 2):
        meet(history, "input", 1024.0 if step == 0 else 1.0)
        whole.advance(told(True))
        found.append(history.scale_inv("input").item())
    assert found == [*[peak] * LENGTH, calm, calm]


def test_a_skipped_step_leaves_no_trace():
    whole = histories()
    history = whole.of(0)
    meet(history, "input", 1.0)
    whole.advance(told(True))
    before, inverse = whole.amax.clone(), whole.scale_inv.clone()
    meet(history, "input", 2.0**20)
    whole.advance(told(False))
    assert torch.equal(whole.amax, before)
    assert torch.equal(whole.scale_inv, inverse)
    assert not whole.cast_stats.any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_never_remembered(bad):
    whole = histories()
    history = whole.of(0)
    for amax in (1.0, bad, 1.0):
        meet(history, "grad_output", amax)
        whole.advance(told(True))
        assert whole.amax.isfinite().all()
        assert history.scale_inv("grad_output").item() == largest_inverse(1.0, 57344.0)


def test_what_was_never_met_keeps_no_scale():
    whole = histories(2)
    meet(whole.of(1), "weight", 3.0)
    whole.advance(told(True))
    untouched = [(m, r) for m in (0, 1) for r in OPERANDS if (m, r) != (1, "weight")]
    assert all(whole.of(m).scale_inv(r).item() == 0 for m, r in untouched)


def test_every_scale_and_every_note_lies_at_a_multiple_of_sixteen_bytes():
    """cuBLAS reads scales from nowhere else."""
    whole = histories(7)
    for number in range(7):
        history = whole.of(number)
        for role in OPERANDS:
            assert history.scale_inv(role).data_ptr() % 16 == 0
            assert history.cast_stats(role).data_ptr() % 16 == 0
            assert history.scale_inv(role).is_contiguous()


def test_no_two_roles_of_any_module_share_a_place():
    whole = histories(5)
    places = [whole.of(m).scale_inv(r).data_ptr() for m in range(5) for r in OPERANDS]
    places += [whole.of(m).cast_stats(r).data_ptr() for m in range(5) for r in OPERANDS]
    assert len(set(places)) == 2 * 5 * len(OPERANDS)


def steps(whole, first, last):
    """Let histories meet matrices; return the codes and scales they led to."""
    found = []
    for step in range(first, last):
        for module in range(2):
            for number, role in enumerate(OPERANDS):
                amax = 2.0 ** ((7 * step + 3 * module + 5 * number) % 11) * 1.3
                made = meet(whole.of(module), role, amax)
                found.append((made.rowwise.float()[0, 0].item(), made.scale_inv.item()))
        whole.advance(told(step % 5 != 3))
    return found


@pytest.mark.parametrize("cut", [0, 1, 4, 20])
def test_a_resumed_history_gives_the_scales_of_one_that_was_never_interrupted(cut):
    straight, first, second = histories(2), histories(2), histories(2)
    expected = steps(straight, 0, cut + 20)
    steps(first, 0, cut)
    saved = {name: value.clone() for name, value in first.state_dict().items()}
    del first
    second.load_state_dict(saved)
    assert steps(second, cut, cut + 20) == expected[cut * 2 * len(OPERANDS) :]


def test_going_back_to_before_the_first_step_lets_the_first_matrix_decide_again():
    whole = histories()
    saved = {name: value.clone() for name, value in whole.state_dict().items()}
    meet(whole.of(0), "input", 2.0**20)
    whole.load_state_dict(saved)
    found = meet(whole.of(0), "input", 3.0)
    assert found.scale_inv.item() == largest_inverse(3.0, 448)
    assert found.rowwise.float()[0, 0] * found.scale_inv == 3.0


def test_memory_that_is_used_again_inherits_no_scale():
    """Scales are known by their address; a freed one may be the address of another at once."""
    before, reused = set(), 0
    for round_number in range(200):
        whole = histories(3)
        places = {whole.of(m).scale_inv(r).data_ptr() for m in range(3) for r in OPERANDS}
        reused += bool(places & before)
        for module in range(3):
            for role in OPERANDS:
                found = meet(whole.of(module), role, 1.5 * 2.0 ** (round_number % 9))
                assert found.rowwise.float()[0, 0] * found.scale_inv == 1.5 * 2.0 ** (
                    round_number % 9
                )
        before |= places
        if reused >= 3:
            return
        del whole, found
    pytest.skip("needs an allocator that uses memory again")


def test_evaluation_notes_no_inputs():
    history = histories().of(0)
    with torch.no_grad():
        assert history.cast_stats("input") is None
        assert history.cast_stats("grad_output") is not None
    assert history.cast_stats("input") is not None
