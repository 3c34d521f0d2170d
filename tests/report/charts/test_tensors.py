import math
from dataclasses import replace

import pytest

from narrowcast.report.charts.heat import BROKEN, COLLECTED, EXACT, tensors


def test_every_value_of_every_tensor_is_in_its_series(growing):
    records = growing(range(10, 101, 10), ["a", "b"])
    found = tensors(records)
    assert [(t.module, t.role) for t in found] == [
        ("a", "input"),
        ("a", "grad_output"),
        ("b", "input"),
        ("b", "grad_output"),
    ]
    for tensor in found:
        for measure in COLLECTED:
            expected = [
                getattr(record, measure)[place]
                for record in records
                for place, pair in enumerate(zip(record.module, record.role, strict=True))
                if pair == (tensor.module, tensor.role)
            ]
            assert list(tensor.values[measure]) == expected


def test_a_tensor_that_was_not_always_sampled_has_gaps(sample, tensor):
    both = {("a", "input"): ("e4m3", tensor(1.0)), ("b", "input"): ("e4m3", tensor(1.0))}
    one = {("b", "input"): ("e4m3", tensor(1.0))}
    a, b = tensors([sample(1, both), sample(2, one), sample(3, both)])
    assert [x is None for x in a.values["snr_db"]] == [False, True, False]
    assert None not in b.values["snr_db"]


def test_a_tensor_that_is_not_finite_has_no_calm_ratio(sample, tensor):
    x = tensor(1.0)
    first, second = (sample(n, {("a", "input"): ("fp16", x)}) for n in (1, 2))
    assert first.snr_db[0] > 60
    (found,) = tensors([first, replace(second, nonfinite=(0.0625,))])
    assert found.values["snr_db"] == (first.snr_db[0], BROKEN)
    assert found.broke() == 1


@pytest.mark.parametrize(("target", "broke"), [("fp16", 1), ("bf16", 1), ("e4m3", None)])
def test_what_a_wide_format_cannot_hold_becomes_an_infinity(target, broke, sample, tensor):
    calm, large = (sample(n, {("a", "input"): (target, tensor(1.0))}) for n in (1, 2))
    (found,) = tensors([calm, replace(large, overflow=(0.002,))])
    assert found.broke() == broke


def test_a_change_of_format_keeps_the_series_and_names_both(sample, tensor):
    x = tensor(1.0)
    first, second = (sample(n, {("a", "input"): (f, x)}) for n, f in ((1, "e4m3"), (2, "bf16")))
    (found,) = tensors([first, second])
    assert found.formats == ("e4m3", "bf16")
    assert not found.wide  # e4m3 saturates
    assert found.values["snr_db"] == (first.snr_db[0], second.snr_db[0])


def test_what_is_not_finite_is_the_worst_and_what_is_exact_the_best(sample, tensor):
    record = sample(1, {("a", "input"): ("e4m3", tensor(1.0))})
    odd = [replace(record, step=n, snr_db=(x,)) for n, x in enumerate((math.inf, 30.0, math.nan))]
    (found,) = tensors(odd)
    assert found.values["snr_db"] == (EXACT, 30.0, BROKEN)
    assert found.worst("snr_db") == (BROKEN, 2)


def test_an_amax_that_is_not_a_number_counts_as_infinite(sample, tensor):
    record = sample(1, {("a", "input"): ("e4m3", tensor(1.0))})
    (found,) = tensors([record, replace(record, amax=(math.nan,))])
    assert found.worst("amax") == (math.inf, 1)


def test_a_tensor_named_twice_in_a_record_keeps_the_worse_value(sample, tensor):
    record = sample(
        1, {("a", "input"): ("e4m3", tensor(1.0)), ("b", "input"): ("e4m3", tensor(1e5))}
    )
    (found,) = tensors([replace(record, module=("a", "a"))])
    assert found.values["overflow"] == (max(record.overflow),)
    assert found.values["snr_db"] == (min(record.snr_db),)


def test_no_records_are_no_tensors():
    assert tensors([]) == []


@pytest.mark.parametrize("role", ["input", "something new"])
def test_a_role_nobody_knows_comes_last(role, sample, tensor):
    x = ("e4m3", tensor(1.0))
    found = tensors([sample(1, {("a", role): x, ("a", "update"): x})])
    assert [t.role for t in found] == (["input", "update"] if role == "input" else ["update", role])
