"""Shares that casts to fp8 count, against ml_dtypes on the tensors themselves."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.hardware import Hardware, Support
from narrowcast.health.statistics.probes import Probes
from narrowcast.health.statistics.reading import Reading
from narrowcast.kernels import launch
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.modules.wrappers import EmulatedLinear

ROWS, WIDE, NARROW = 256, 128, 48
THEIRS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
FORMATS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}

# Of 2 × 2 tiles of 128 × 64, the interpreter counts the first: one in seven on diagonals.
WAYS = {
    "kernel": lambda x: x[:128, :64],
    "emulated": lambda x: x[::7],  # of rows whose number seven does not divide
}
ways = pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            "kernel",
            marks=[
                pytest.mark.interpreted,
                pytest.mark.skipif(
                    torch.__version__ < "2.13" or not launch.interpreted(),
                    reason="needs torch 2.13 on a CPU, where kernels are interpreted",
                ),
            ],
        ),
        "emulated",
    ],
)


def made(way, *, policy="fp8-delayed"):
    """A model of one layer, and a CPU that claims to have fp8 products: torch's has, slowly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, NARROW, bias=False))
    native = dict.fromkeys(
        ("fp32", "bf16", "e4m3", "e5m2"), Support(how="native", reason="claimed")
    )
    hardware = Hardware(
        device="cpu",
        name="a CPU",
        memory_bytes=2**30,
        products=native if way == "kernel" else {},
    )
    plan = nc.plan(model, policy, hardware=hardware, skip_slow_fp8=False)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy=plan)
    assert isinstance(model[0], Fp8Linear if way == "kernel" else EmulatedLinear)
    return run


def batch(step):
    """Values over many powers of two, whose largest leaps and falls."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDE, generator=generator) ** 7
    return in_bf16(x * 2.0 ** ((0, 9, -3, 1, 14)[step % 5]))


def gradient(step):
    generator = torch.Generator().manual_seed(100 + step)
    g = torch.randn(ROWS, NARROW, generator=generator) ** 15
    return in_bf16(g * 2.0 ** ((0, 8, 3)[step % 3] - 30))


def in_bf16(x):
    """As tensors between layers are; the interpreter, not a GPU, takes subnormal ones for zero."""
    return torch.where(x.abs() < 2.0**-120, 0.0, x).bfloat16().float()


def passes(run, step):
    """Make the passes of a step with known tensors; return them by role."""
    x = batch(step)
    tensors = {"input": x, "weight": run.model[0].weight.detach().clone()}
    tensors["grad_output"] = gradient(step)
    with run.autocast():
        y = run.model(x)
    run.backward((y.float() * tensors["grad_output"]).sum())
    return tensors


def step_(run, probes, step):
    tensors = passes(run, step)
    probes.weights.take()
    assert run.step().applied
    return tensors


def inverse_for(amax, top):
    """The smallest power of two that brings `amax` within the format, by trying all of them."""
    return next(2.0**n for n in range(-126, 127) if amax / 2.0**n <= top)


def lost(x, form, *, past):
    """How many values there are, are beyond the format, and become zero in ml_dtypes' cast."""
    kind, top = THEIRS[form]
    scaled = x.double().numpy() / inverse_for(max(past), top)
    cast = np.clip(scaled, -top, top).astype(np.float32).astype(kind).astype(np.float32)
    return np.array([x.numel(), (abs(scaled) > top).sum(), ((cast == 0) & (scaled != 0)).sum()])


def shares(record):
    columns = zip(record.overflow, record.underflow, record.amax, strict=True)
    return dict(zip(zip(record.module, record.role, strict=True), columns, strict=True))


@ways
def test_a_reading_tells_exactly_what_the_casts_since_the_last_one_have_lost(way):
    run = made(way)
    probes = Probes(run.model, run.plan)
    history = {role: [] for role in FORMATS}
    step = 0
    for until in (2, 5):  # two readings
        expected = {role: np.zeros(3) for role in FORMATS}
        peaks = dict.fromkeys(FORMATS, 0.0)
        while step < until:
            for role, x in step_(run, probes, step).items():
                amax = x.abs().max().item()
                past = history[role][-16:] or [amax]  # the first matrix decides for itself
                expected[role] += lost(WAYS[way](x), FORMATS[role], past=past)
                history[role].append(amax)
                peaks[role] = max(peaks[role], amax)
            step += 1
        told = shares(Reading(probes, step=step).records()[0])
        for role, (looked, saturated, flushed) in expected.items():
            assert told["0", role] == pytest.approx(
                (saturated / looked, flushed / looked, peaks[role]), rel=2.0**-22
            )
        assert expected["input"][1] > 0
        assert expected["input"][2] > 0
        assert expected["grad_output"][2] > 0


@ways
def test_where_nothing_was_counted_the_sample_is_told(way):
    run, never = made(way), made(way)
    probes = Probes(run.model, run.plan)
    step_(run, probes, 0)
    step_(run, probes, 1)
    first = shares(Reading(probes, step=2).records()[0])
    again = shares(Reading(probes, step=2).records()[0])  # no step since
    assert first["0", "input"][0] > 0
    assert again["0", "input"][0] == 0  # scaled by itself a sample never saturates
    probes = Probes(never.model, never.plan)
    passes(never, 0)
    (record,) = Reading(probes, step=1).records()  # before the step is applied, or skipped
    sample = next(s.sample for s in probes.sites if s.role == "input")
    assert shares(record)["0", "input"][2] == sample.abs().max().item()


@ways
def test_evaluations_and_replays_are_not_counted(way):
    told = []
    for looks in (False, True):
        run = made(way)
        probes = Probes(run.model, run.plan)
        for step in range(3):
            if looks:
                with torch.no_grad(), run.autocast():
                    run.model(batch(4))
                with run.engine.isolated():
                    passes(run, 4)
            step_(run, probes, step)
        told.append(Reading(probes, step=3).records())
    assert told[0] == told[1]


def test_a_skipped_step_is_not_counted():
    told = []
    for skips in (False, True):
        run = made("emulated")
        probes = Probes(run.model, run.plan)
        for step in (0, 1):
            if skips:
                with run.autocast():
                    loss = run.model(batch(4)).float().sum() * float("inf")
                assert not run.step(loss).applied
            step_(run, probes, step)
        told.append(Reading(probes, step=2).records())
    assert told[0] == told[1]


def test_a_reading_in_another_format_than_the_casts_takes_no_counts():
    run = made("emulated")
    with nc.monitor(run.model, policy="fp32", every=1) as watch:
        passes(run, 0)
        run.step()
        passes(run, 1)
        watch.step()
        run.step()
    assert set(watch.statistics.overflow) == {0.0}
    histories = run.model[0].nc_history.whole
    assert histories.counts[..., 1].any()  # they wait for who asks in their format


@pytest.mark.parametrize("length", [4, 7, 8, 16, 63])
def test_an_emulated_cast_counts_the_tokens_of_a_sequence_alike(length):
    run = made("emulated")
    probes = Probes(run.model, run.plan)
    loud = torch.ones(64, length, WIDE)
    loud[:, 0] *= 1000.0
    for step, x in enumerate((torch.ones_like(loud), loud)):
        with run.autocast():
            loss = run.model(x).square().mean()
        run.step(loss)
        told = shares(Reading(probes, step=step).records()[0])
    assert told["0", "input"][0] == pytest.approx(1 / length, rel=0.15)  # by the scale of before
