import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import CheckpointError
from narrowcast.runs import (
    CheckpointRecord,
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    PrecisionRecord,
    StepRecord,
    from_line,
    same_trajectory,
    to_line,
)

WHOLE = st.integers(min_value=0, max_value=2**63)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)
METRICS = st.text().filter(lambda name: name not in ("kind", "step"))
RECORDS = st.one_of(
    st.builds(
        StepRecord,
        step=WHOLE,
        loss=NUMBERS,
        loss_scale=NUMBERS,
        applied=st.booleans(),
        skip_reason=st.text() | st.sampled_from(["nan", "inf", "-inf"]),
        grad_norm=NUMBERS,
        lr=NUMBERS,
        lost_updates=st.none() | NUMBERS,
        items=WHOLE,
        seconds=NUMBERS,
        peak_bytes=WHOLE,
        loss_parts=st.dictionaries(st.text(), NUMBERS, max_size=3),
    ),
    st.builds(EvalRecord, step=WHOLE, metrics=st.dictionaries(METRICS, NUMBERS, max_size=5)),
    st.builds(
        FindingRecord,
        step=WHOLE,
        since=WHOLE,
        module=st.text(),
        role=st.text(),
        what=st.text(),
        why=st.text(),
        action=st.text(),
        advice=st.text(),
    ),
    st.builds(
        ExponentRecord,
        step=WHOLE,
        module=st.text(),
        role=st.text(),
        format=st.text(),
        lowest=st.integers(-1100, 1100),
        counts=st.lists(WHOLE, max_size=5).map(tuple),
    ),
    st.builds(
        PrecisionRecord,
        step=WHOLE,
        module=st.text(),
        before=st.text(),
        after=st.text(),
        reason=st.text(),
    ),
    st.builds(
        CheckpointRecord, step=WHOLE, seconds_blocked=NUMBERS, seconds_total=NUMBERS, bytes=WHOLE
    ),
)

STEP = StepRecord(
    step=7,
    loss=2.5,
    loss_scale=65536.0,
    applied=True,
    skip_reason="",
    grad_norm=0.5,
    lr=1e-3,
    lost_updates=None,
    items=4096,
    seconds=0.25,
    peak_bytes=1024,
)


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


@given(RECORDS)
def test_a_record_is_read_back_from_its_line(record):
    # By repr, which tells -0.0 from 0.0 and finds nan equal to nan.
    assert repr(from_line(to_line(record))) == repr(record)


@given(RECORDS)
def test_a_line_is_one_line_of_strict_json_with_its_kind_first(record):
    line = to_line(record)
    assert "\n" not in line
    assert line.isascii()
    found = json.loads(line, parse_constant=refuse)
    assert next(iter(found)) == "kind"
    assert all(
        isinstance(value, bool | int | float | str | list | dict | None) for value in found.values()
    )


@given(RECORDS)
def test_a_record_is_of_the_same_course_as_itself(record):
    assert same_trajectory(record, from_line(to_line(record)))


def test_a_step_is_written_as_the_design_says():
    assert to_line(STEP) == (
        '{"kind": "step", "step": 7, "loss": 2.5, "loss_scale": 65536.0, "applied": true, '
        '"skip_reason": "", "grad_norm": 0.5, "lr": 0.001, "lost_updates": null, "items": 4096, '
        '"seconds": 0.25, "peak_bytes": 1024}'
    )


def test_numbers_that_are_not_finite_are_words():
    record = EvalRecord(step=1, metrics={"a": math.inf, "b": -math.inf, "c": math.nan})
    assert to_line(record) == '{"kind": "eval", "step": 1, "a": "inf", "b": "-inf", "c": "nan"}'


def test_formats_before_and_after_are_called_from_and_to_on_the_line():
    record = PrecisionRecord(step=1, module="head", before="e4m3", after="bf16", reason="overflow")
    found = json.loads(to_line(record))
    assert (found["from"], found["to"]) == ("e4m3", "bf16")


@pytest.mark.parametrize("field", ["seconds", "peak_bytes"])
def test_what_a_meter_read_is_no_part_of_the_course(field):
    assert same_trajectory(STEP, replace(STEP, **{field: 99}))


@pytest.mark.parametrize(
    "field", sorted({f.name for f in fields(StepRecord)} - {"seconds", "peak_bytes"})
)
def test_all_that_no_meter_read_is_part_of_the_course_of_a_run(field):
    value = {"applied": False, "skip_reason": "overflow", "lost_updates": 0.5}.get(field, 99)
    assert not same_trajectory(STEP, replace(STEP, **{field: value}))


def test_checkpoints_of_one_step_are_of_the_same_course_whatever_they_cost():
    a = CheckpointRecord(step=1, seconds_blocked=1.0, seconds_total=2.0, bytes=3)
    b = CheckpointRecord(step=1, seconds_blocked=9.0, seconds_total=9.0, bytes=9)
    assert same_trajectory(a, b)
    assert not same_trajectory(a, replace(b, step=2))


def test_records_of_different_kinds_are_of_different_courses():
    assert not same_trajectory(STEP, EvalRecord(step=7))


@pytest.mark.parametrize("name", ["kind", "step"])
def test_a_metric_cannot_take_the_name_of_the_lines_own_keys(name):
    with pytest.raises(ValueError, match=f"A metric must not be named {name}"):
        to_line(EvalRecord(step=1, metrics={name: 1.0}))


LINE = to_line(STEP)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not a record"),
        ("{", "not a record"),
        ("[]", "kind must be one of step, eval, health, exponents, finding, precision, checkpoint"),
        ('{"kind": "stap", "step": 1}', "kind must be one of"),
        ('{"kind": ["step"]}', "kind must be one of"),
        ('{"kind": "eval"}', "step is not a whole number"),
        ('{"kind": "eval", "step": 1, "loss": NaN}', "NaN is not JSON"),
        ('{"kind": "eval", "step": 1, "loss": "big"}', "loss is not a number"),
        ('{"kind": "eval", "step": 1, "loss": true}', "loss is not a number"),
        (
            '{"kind": "eval", "step": 1, "loss": 1' + "0" * 400 + "}",
            r"not a record of kind eval \(int too large",
        ),
        (LINE.replace("7", "7.5", 1), "step is not a whole number"),
        (LINE.replace("7", "true", 1), "step is not a whole number"),
        (LINE.replace("true", "1"), "applied is not true or false"),
        (LINE.replace('""', "0"), "skip_reason is not text"),
        (LINE.replace(', "items": 4096', ""), "items is missing"),
        (LINE.replace("}", ', "x": 1}'), "x is not a known field"),
        ("[" * 100_000, "not a record"),
        ("0" * 10_000, "not a record"),
    ],
)
def test_a_line_that_is_no_record_is_refused(line, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        from_line(line)
    assert len(str(caught.value)) < 300


def test_a_step_from_before_there_were_other_units_is_read():
    line = to_line(STEP).replace('"items"', '"tokens"')
    assert from_line(line) == STEP
