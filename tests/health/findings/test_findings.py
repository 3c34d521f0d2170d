"""Rules on statistics of real tensors that go wrong in known ways."""

import json
import math

import pytest
import torch

from narrowcast.health.findings.findings import CALM, Findings
from narrowcast.health.findings.rules import STEADY
from narrowcast.health.statistics.statistics import COLUMNS, statistics
from narrowcast.numerics import format_named
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.policy import PRESETS, parse_policy
from narrowcast.precision.plan.wording import Wording
from narrowcast.runs import HealthRecord, StepRecord


def look(step, *tensors):
    """A record of tensors: (module, role, format, values)."""
    rows = [
        statistics(x.view(1, -1), format_named(form), scaling="none")[0].tolist()
        for _, _, form, x in tensors
    ]
    columns = {name: tuple(row[i] for row in rows) for i, name in enumerate(COLUMNS)}
    snr = tuple(None if math.isnan(v) else v for v in columns.pop("snr_db"))
    modules, roles, formats = (tuple(t[i] for t in tensors) for i in range(3))
    return HealthRecord(
        step=step, module=modules, role=roles, format=formats, snr_db=snr, **columns
    )


def step(number, loss, **changes):
    facts = {
        "step": number, "loss": loss, "loss_scale": 1.0, "applied": True, "skip_reason": "",
        "grad_norm": 1.0, "lr": 1e-3, "lost_updates": None, "items": 1, "seconds": 0.1,
        "peak_bytes": 1,
    }  # fmt: skip
    return StepRecord(**{**facts, **changes})


def drawn(seed=0, *, times=1.0):
    return torch.randn(2048, generator=torch.Generator().manual_seed(seed)) * times


def whats(found):
    return [(f.module, f.role, f.what) for f in found]


def test_a_healthy_run_has_no_findings():
    findings = Findings()
    for n in range(100):
        assert findings.look(look(n, ("a", "input", "e4m3", drawn(n)))) == []
        assert findings.look(look(n, ("a", "grad_output", "fp16", drawn(n)))) == []
        noise = drawn(n)[0].item()
        assert findings.step(step(n, 4.0 * 0.97**n + 2 + 0.02 * noise, lost_updates=0.1)) == []


@pytest.mark.parametrize(
    ("form", "times", "what", "advice"),
    [
        ("fp16", 3e4, "overflow of fp16", "bf16"),
        ("e4m3", 300.0, "saturation of e4m3", "bf16"),
        ("fp32", math.inf, "not finite", "narrowcast.explain"),
        ("bf16", math.inf, "not finite", "narrowcast.explain"),
        ("e4m3", math.inf, "not finite", "narrowcast.explain"),
    ],
)
def test_values_beyond_a_format_are_found_once_and_again_after_a_calm(form, times, what, advice):
    findings = Findings()
    bad = ("mlp", "output", form, drawn(times=times))
    good = ("mlp", "output", form, drawn())
    (found,) = findings.look(look(7, bad))
    assert (found.module, found.role, found.what, found.since) == ("mlp", "output", what, 7)
    assert advice in found.advice
    assert "%" in found.why
    assert findings.look(look(8, bad)) == []
    for n in range(CALM):
        assert findings.look(look(9 + n, good)) == []
    assert whats(findings.look(look(20, bad))) == [("mlp", "output", what)]


def test_of_all_that_is_not_finite_only_the_first_is_named():
    bad, good = torch.full((128,), math.nan), drawn()
    forward = look(
        1,
        ("a", "input", "fp16", good),
        ("a", "output", "fp16", good),
        ("b", "input", "fp16", good),
        ("b", "output", "fp16", torch.full((128,), math.inf)),
        ("c", "output", "fp16", bad),
        ("a", "grad_output", "fp16", bad),
    )
    assert whats(Findings().look(forward)) == [("b", "output", "overflow of fp16")]
    backward = look(
        1,
        ("a", "grad_output", "fp16", bad),
        ("b", "grad_output", "fp16", bad),
        ("c", "grad_output", "fp16", good),
    )
    assert whats(Findings().look(backward)) == [("b", "grad_output", "overflow of fp16")]


@pytest.mark.parametrize("form", ["fp32", "tf32", "bf16", "fp16", "e4m3"])
def test_what_comes_into_the_model_not_finite_is_no_overflow_of_any_format(form):
    bad = torch.full((128,), math.nan)
    arrived = look(1, ("a", "input", form, bad), ("a", "output", form, bad))
    (found,) = Findings().look(arrived)
    assert (found.module, found.role, found.what) == ("a", "input", "not finite")
    assert found.why == "100 % of the values are NaN or inf"
    assert "check the data" in found.advice
    assert "overrides" not in found.advice


@pytest.mark.pairwise
@pytest.mark.parametrize("form", ["fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "mxfp8"])
@pytest.mark.parametrize("role", ["input", "weight", "output", "grad_output", "grad_weight"])
@pytest.mark.parametrize("times", [1e-42, 3e4, 3e38, math.inf])
def test_nobody_is_told_to_try_the_format_in_force(form, role, times):
    target = format_named("e4m3" if form == "mxfp8" else form)
    row = statistics(drawn(times=times).view(1, -1), target)[0].tolist()
    columns = {name: (value,) for name, value in zip(COLUMNS, row, strict=True)} | {"snr_db": (0,)}
    seen = HealthRecord(step=1, module=("a",), role=(role,), format=(form,), **columns)
    for found in Findings().look(seen):
        assert f'"a": {form}' not in found.advice


def test_gradients_that_round_to_zero_are_found_and_activations_that_do_are_not():
    tiny = drawn(times=1e-8)
    found = Findings().look(
        look(1, ("a", "grad_output", "fp16", tiny), ("a", "output", "fp16", tiny))
    )
    assert whats(found) == [("a", "grad_output", "gradients below fp16")]
    assert "a larger LossScale.max_scale" in found[0].advice


def test_gradients_at_the_lower_end_of_fp16_mean_a_scale_too_low_while_there_is_room():
    scaling = LossScale(init_scale=64.0, max_scale=2.0**18, growth_interval=500)
    tensors = (
        ("a", "grad_output", "fp16", drawn(times=1.0)),
        ("b", "grad_output", "fp16", drawn(times=1e-4)),
        ("c", "grad_output", "fp16", drawn(times=1e-9)),  # vanishes, for the same reason
        ("c", "output", "fp16", drawn(times=1e-5)),
    )
    findings = Findings()
    (found,) = findings.look(look(9, *tensors), scaling=scaling, loss_scale=64.0)
    assert (found.what, found.role, found.since) == ("loss scale too low", "loss scale", 9)
    assert "100 % of c grad_output" in found.why
    assert found.why.endswith("the scale is 64")
    room = 65504 / 16 / drawn().abs().max().item()
    possible = 64 * 2 ** math.floor(math.log2(room))
    assert f"loss_scale=LossScale(init_scale={possible}) or " in found.advice
    assert "growth_interval below 500" in found.advice
    assert ("vanishing", "c", "grad_output") in findings.present  # a wider format would help, too
    assert findings.look(look(10, *tensors), scaling=scaling, loss_scale=64.0) == []


@pytest.mark.parametrize(
    ("largest", "scaling"),
    [
        (1e-5, LossScale(init_scale=64.0, max_scale=64.0)),  # as far as it may go
        (6e4, LossScale(init_scale=64.0)),  # another gradient would overflow
        (1e-5, None),
    ],
)
def test_a_scale_without_room_is_not_too_low_and_gradients_vanish(largest, scaling):
    vanishing = ("a", "grad_output", "fp16", drawn(times=1e-8))
    other = ("b", "grad_output", "fp16", torch.full((128,), largest))
    found = Findings().look(look(1, vanishing, other), scaling=scaling, loss_scale=64.0)
    assert whats(found) == [("a", "grad_output", "gradients below fp16")]


def test_a_fixed_scale_is_not_told_to_grow():
    scaling = LossScale(init_scale=1.0, dynamic=False)
    (found,) = Findings().look(
        look(1, ("a", "grad_weight", "fp16", drawn(times=1e-6))), scaling=scaling
    )
    assert found.what == "loss scale too low"
    assert "growth" not in found.advice


def test_a_scale_that_came_down_to_its_floor_is_found_once_and_again_after_it_rose():
    findings, scaling = Findings(), LossScale(init_scale=8.0)
    scales = [8.0, 4.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0]
    told = [
        findings.step(step(n, 2.0, loss_scale=scale), scaling=scaling)
        for n, scale in enumerate(scales)
    ]
    assert [n for n, found in enumerate(told) if found] == [2, 8]
    assert whats(told[2]) == [("", "loss scale", "loss scale at its floor")]
    assert "from 8 to 1" in told[2][0].why
    assert "a smaller LossScale.min_scale" in told[2][0].advice


@pytest.mark.parametrize(
    "scaling", [None, LossScale(init_scale=1.0), LossScale(init_scale=1.0, dynamic=False)]
)
def test_a_scale_that_began_at_its_floor_is_no_finding(scaling):
    assert Findings().step(step(1, 2.0, loss_scale=1.0), scaling=scaling) == []


def test_a_layer_of_zeros_is_dead_only_after_some_looks():
    findings, zeros = Findings(), torch.zeros(128)
    told = [
        whats(
            findings.look(look(n, ("a", "input", "bf16", drawn(n)), ("a", "output", "bf16", zeros)))
        )
        for n in range(6)
    ]
    assert told == [[], [], [], [("a", "output", "dead layer")], [], []]


def test_magnitudes_that_grow_beyond_their_past_are_found():
    findings = Findings()
    for n in range(40):
        assert findings.look(look(n, ("a", "input", "bf16", drawn(n)))) == []
    grown = [look(40 + n, ("a", "input", "bf16", drawn(n, times=100.0))) for n in range(STEADY)]
    told = [whats(findings.look(each)) for each in grown]
    assert told == [[]] * (STEADY - 1) + [[("a", "input", "magnitudes grow")]]
    leaping = Findings()
    for n in range(50):
        times = 100.0 if n > 40 else 1.0
        assert leaping.look(look(n, ("a", "grad_output", "bf16", drawn(n, times=times)))) == []


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_a_rare_large_value_that_samples_sometimes_contain_is_not_growth(share):
    findings, generator = Findings(), torch.Generator().manual_seed(0)
    for n in range(300):
        x = drawn(n % 7)
        if torch.rand((), generator=generator) < share:
            x[0] = 1e4
        assert findings.look(look(n, ("a", "output", "bf16", x))) == []


def test_a_layer_whose_weight_has_a_gradient_is_not_dead():
    findings, zeros = Findings(), torch.zeros(128)
    for n in range(6):
        tensors = (("a", "grad_output", "bf16", zeros), ("a", "grad_weight", "bf16", drawn(n)))
        assert findings.look(look(n, *tensors)) == []


def test_a_loss_spike_is_found_and_a_steep_beginning_is_not():
    findings = Findings()
    for n in range(80):
        assert findings.step(step(n, 8 * 0.95**n + 2 + 0.05 * drawn(n)[0].item())) == []
    (found,) = findings.step(step(80, 9.0))
    assert (found.what, found.since) == ("loss spike", 80)
    assert findings.step(step(81, math.nan, applied=False)) == []


def test_weights_that_stand_still_are_found_when_they_are_measured():
    findings = Findings()
    assert whats(findings.step(step(1, 2.0, lost_updates=0.9))) == [("", "update", "lost updates")]
    assert findings.step(step(2, 2.0)) == []
    assert findings.step(step(3, 2.0, lost_updates=0.9)) == []


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ("bf16-pure", "try master=split"),
        ("bf16, params=bf16, master=split", "stored already: try a higher"),
        ("fp32", "stored already: try a higher"),
    ],
)
def test_nobody_is_told_to_keep_digits_that_are_kept_already(policy, advice):
    words = Wording(policy=parse_policy(policy, presets=PRESETS))
    (found,) = Findings(lambda: words).step(step(1, 2.0, lost_updates=0.9))
    assert advice in found.advice


@pytest.mark.parametrize("lr", [9e-6, 1e-9])
@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("fp32", []),
        ("bf16, params=bf16, master=fp32", []),
        ("bf16, params=bf16, master=split", []),
        ("bf16, params=bf16, master=kahan", [("", "update", "lost updates")]),
        ("bf16-pure", [("", "update", "lost updates")]),
    ],
)
def test_lost_updates_at_the_end_of_a_schedule_are_a_finding_only_without_all_digits(
    policy, told, lr
):
    words = Wording(policy=parse_policy(policy, presets=PRESETS))
    findings, resumed = Findings(lambda: words), Findings(lambda: words)
    assert findings.step(step(1, 2.0, lr=1e-3, lost_updates=0.1)) == []
    resumed.load_state_dict(json.loads(json.dumps(findings.state_dict())))
    for each in (findings, resumed):
        assert whats(each.step(step(2, 2.0, lr=lr, lost_updates=0.9))) == told


def test_weights_that_a_rate_of_zero_leaves_where_they_are_have_lost_nothing():
    assert Findings().step(step(1, 2.0, lr=0.0, lost_updates=1.0)) == []


def test_what_is_known_survives_a_checkpoint_as_plain_data():
    straight, first, second = Findings(), Findings(), Findings()
    records = [
        look(n, ("a", "input", "e4m3", drawn(n, times=1.0 if n < 30 else 400.0))) for n in range(40)
    ]
    expected = [straight.look(r) for r in records]
    told = [first.look(r) for r in records[:25]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    told += [second.look(r) for r in records[25:]]
    assert told == expected
    assert sum(map(len, told)) == 2
