import json
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import CheckpointError
from narrowcast.numerics import E4M3, cast_loss, round_to, snr_db
from narrowcast.runs import HealthRecord, from_line, same_trajectory, to_line
from narrowcast.runs.health_records import NAMES, NUMBERS, SHARES

SHARE = st.floats(0, 1)
NUMBER = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def records(draw):
    n = draw(st.integers(0, 6))
    kinds = {name: st.text() for name in NAMES} | dict.fromkeys(SHARES, SHARE)
    kinds |= {"amax": NUMBER, "amin": NUMBER, "snr_db": st.none() | NUMBER}
    columns = {name: tuple(draw(kind) for _ in range(n)) for name, kind in kinds.items()}
    return HealthRecord(step=draw(st.integers(0, 2**63)), **columns)


def measured(tensors, *, step=7):
    """Measure what e4m3 does to tensors, as a run would."""
    losses = [cast_loss(x, E4M3) for x in tensors]
    small = [(x != 0) & (x.abs() < E4M3.smallest_normal) for x in tensors]
    return HealthRecord(
        step=step,
        module=tuple(f"blocks.{i}.mlp" for i in range(len(tensors))),
        role=("input",) * len(tensors),
        format=("e4m3",) * len(tensors),
        amax=tuple(float(x.abs().max()) for x in tensors),
        amin=tuple(float(x[x != 0].abs().min()) for x in tensors),
        overflow=tuple(found.overflow_rate for found in losses),
        underflow=tuple(found.flush_rate for found in losses),
        subnormal=tuple(float(mask.double().mean()) for mask in small),
        nonfinite=tuple(found.nonfinite / found.elements for found in losses),
        snr_db=tuple(snr_db(x, round_to(x, E4M3, saturate=True)) for x in tensors),
    )


@pytest.fixture(scope="module")
def record():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(999, generator=generator) * 10.0**k for k in (-6, -3, 0, 3, 6)]
    return measured(tensors)


@given(records())
def test_a_record_read_back_differs_by_less_than_its_fourth_digit(record):
    found = from_line(to_line(record))
    assert (found.step, found.module, found.role, found.format) == (
        record.step,
        record.module,
        record.role,
        record.format,
    )
    for name in NUMBERS:
        for before, after in zip(getattr(record, name), getattr(found, name), strict=True):
            if before is None or not math.isfinite(before):
                assert repr(after) == repr(before)
            # Half a unit of the fourth digit; the format of a float adds its own last bit.
            else:
                assert abs(after - before) <= abs(before) * 5.01e-4 + 5e-324


@given(records())
def test_a_line_read_and_written_again_is_the_same_line(record):
    line = to_line(record)
    assert line.isascii()
    assert "\n" not in line
    assert to_line(from_line(line)) == line
    assert same_trajectory(record, from_line(line))


def test_real_tensors_are_read_back_with_what_they_lost(record):
    found = from_line(to_line(record))
    assert found.overflow[4] > 0.9
    assert found.overflow[2] == 0
    assert found.underflow[0] > 0.9
    # Three stored bits round to a relative error below 2**-4, so to more than 24 dB.
    assert found.snr_db[2] == pytest.approx(record.snr_db[2], rel=5e-4)
    assert found.snr_db[2] > 24


def test_a_name_stands_once_on_the_line(record):
    line = to_line(replace(record, module=("blocks.0.mlp.down",) * 5))
    assert line.count("blocks.0.mlp.down") == 1
    assert line.count('"input"') == line.count('"e4m3"') == 1
    found = json.loads(line)
    assert list(found)[:2] == ["kind", "step"]
    assert [found["modules"][i] for i in found["module"]] == ["blocks.0.mlp.down"] * 5


def test_numbers_have_four_digits_and_words_where_they_are_not_finite(record):
    few = (1.23456789e-7, 0.0, math.inf, 65504.0, 12.0)
    line = to_line(replace(record, amax=few, snr_db=(None, math.nan, -math.inf, 31.54321, 0.0)))
    assert '"amax":[1.235e-07,0,"inf",6.55e+04,12]' in line
    assert '"snr_db":[null,"nan","-inf",31.54,0]' in line


@pytest.mark.parametrize("x", [-0.0, 1.7976e308, -1.7976931348623157e308, 5e-324])
def test_the_ends_of_what_a_float_can_hold_are_read_back_as_they_are_written(x, record):
    odd = replace(record, amax=(x, 1.0, 2.0, 3.0, x))
    found = from_line(to_line(odd))
    assert all(map(math.isfinite, found.amax))
    assert same_trajectory(odd, found)


def test_a_line_of_600_tensors_is_read_in_milliseconds_and_is_below_50_kilobytes():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(64, generator=generator) * 30 for _ in range(600)]
    names = tuple(f"transformer.blocks.{i // 6}.mlp.down" for i in range(600))
    line = to_line(replace(measured(tensors), module=names))
    assert len(line) < 50_000
    took = []
    for _ in range(5):
        began = time.process_time()
        from_line(line)
        took.append(time.process_time() - began)
    # A thousand such lines belong to a run of 10,000 steps; a page of it may take 5 s in all.
    assert min(took) < 0.004


@pytest.mark.parametrize("name", [*NAMES, *NUMBERS])
def test_columns_of_different_lengths_are_refused(record, name):
    with pytest.raises(ValueError, match=f"must have the same length, got .*{name} 4"):
        replace(record, **{name: getattr(record, name)[1:]})


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("bad", [-0.1, 1.5, math.nan, math.inf])
def test_what_is_no_share_is_refused(record, name, bad):
    with pytest.raises(ValueError, match=f"{name} must be shares from 0 to 1"):
        replace(record, **{name: (0.0, bad, 0.0, 0.0, 0.0)})


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"step":7', '"step":true', "step is not a whole number"),
        ('"step":7,', "", "step is not a whole number"),
        ('"module":[0,', '"module":[-1,', "module is not a list of indices into modules"),
        ('"module":[0,', '"module":[99,', "module has an index beyond modules"),
        ('"module":[0,', '"module":[0.5,', "module is not a list of indices"),
        ('"module":[0,', '"module":[', "columns must have the same length"),
        ('"formats":["e4m3"]', '"formats":[4]', "formats are not text"),
        ('"formats":["e4m3"]', '"formats":"e4m3"', "formats is not a list"),
        ('"roles":["input"],', "", "roles is missing"),
        ('"nonfinite":[0,', '"nonfinite":[null,', "nonfinite has a value that is not a number"),
        ('"nonfinite":[0,', '"nonfinite":[false,', "nonfinite has a value that is not a"),
        ('"nonfinite":[0,', '"nonfinite":["big",', "nonfinite has a value that is not a"),
        ('"nonfinite":[0,', '"nonfinite":[2,', "must be shares from 0 to 1"),
        ('"step":7', '"step":7,"x":1', "x is not a known field"),
    ],
)
def test_a_line_that_is_no_record_of_health_is_refused(record, before, after, message):
    line = to_line(record)
    assert before in line
    with pytest.raises(CheckpointError, match=message) as caught:
        from_line(line.replace(before, after, 1))
    assert len(str(caught.value)) < 400


def test_counts_of_exponents_are_whole_numbers():
    line = '{"kind": "exponents", "step": 1, "module": "a", "role": "input", "format": "e4m3", '
    with pytest.raises(CheckpointError, match="counts is not a whole number"):
        from_line(line + '"lowest": -3, "counts": [1, 2.5]}')
    with pytest.raises(CheckpointError, match="counts is not a list"):
        from_line(line + '"lowest": -3, "counts": 3}')
