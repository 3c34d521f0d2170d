import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.report.charts.heat import BROKEN, MOST_COLUMNS, WORST_TENSORS, heat_map
from narrowcast.runs import HealthRecord


def a_record(step, snr, overflow):
    return HealthRecord(
        step=step,
        module=("a",),
        role=("input",),
        format=("e4m3",),
        amax=(1.0,),
        amin=(0.1,),
        overflow=(overflow,),
        underflow=(0.0,),
        subnormal=(0.0,),
        nonfinite=(0.0,),
        snr_db=(snr,),
    )


def columns_of(heat, measure, row=0):
    found = heat.data["measures"][measure][row]
    return found if isinstance(found, list) else [found] * len(heat.data["spans"])


@given(
    values=st.lists(
        st.tuples(st.floats(0, 60), st.floats(0, 1)), min_size=1, max_size=3 * MOST_COLUMNS
    )
)
def test_each_column_is_the_worst_of_its_steps_and_no_step_is_left_out(values):
    records = [a_record(10 * n, snr, part) for n, (snr, part) in enumerate(values)]
    heat = heat_map(records)
    spans = heat.data["spans"]
    assert len(spans) == min(len(values), MOST_COLUMNS)
    at = 0
    for column, (first, last) in enumerate(spans):
        seen = [v for n, v in enumerate(values) if first <= 10 * n <= last]
        at += len(seen)
        assert columns_of(heat, "snr_db")[column] == round(min(s for s, _ in seen), 1)
        if "overflow" in heat.data["measures"]:
            expected = float(f"{max(o for _, o in seen):.3g}")
            assert columns_of(heat, "overflow")[column] == expected
    assert at == len(values)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=400, unique=True))
def test_every_sampled_step_lies_within_the_edges_of_its_column(steps):
    heat = heat_map([a_record(step, 30.0, 0.0) for step in steps])
    edges = heat.data["edges"]
    assert edges == sorted(edges)
    for (first, last), low, high in zip(heat.data["spans"], edges, edges[1:], strict=False):
        assert low < first <= last < high


def test_one_bad_step_of_ten_thousand_is_seen():
    records = [a_record(n, 30.0, 0.0) for n in range(10_000)]
    records[7003] = a_record(7003, 2.5, 0.25)
    heat = heat_map(records)
    assert min(columns_of(heat, "snr_db")) == 2.5
    assert max(columns_of(heat, "overflow")) == 0.25
    assert heat.worst[0]["step"] == "7,003"
    assert "worst of 55 or 56 sampled steps" in heat.note


def test_the_tensor_that_outgrows_its_format_is_the_worst(growing):
    heat = heat_map(growing(range(10, 301, 10), ["calm", "blocks.1.mlp.down"]))
    assert (heat.worst[0]["module"], heat.worst[0]["role"]) == ("blocks.1.mlp.down", "input")
    assert heat.worst[0]["step"] == "300"
    assert "the worst is the input of blocks.1.mlp.down in e4m3" in heat.alt
    assert "overflowed" in heat.alt


def test_a_measure_that_nothing_shows_cannot_be_chosen(growing):
    names = [name for name, _ in heat_map(growing(range(10, 31, 10), ["a", "b"])).measures]
    assert "nonfinite" not in names
    assert names[:2] == ["snr_db", "overflow"]


def test_tensors_that_are_not_finite_come_before_all_others(growing):
    records = growing(range(10, 31, 10), ["a", "b", "c"])
    worse = replace(records[1], nonfinite=(0.0, 0.5, 0.0, 0.0, 0.0, 0.0))
    heat = heat_map([records[0], worse, records[2]])
    assert (heat.worst[0]["module"], heat.worst[0]["role"]) == ("a", "grad_output")
    assert heat.worst[0]["nonfinite"] == "50 %"
    assert "nonfinite" in [name for name, _ in heat.measures]


def test_the_first_to_break_is_the_one_a_step_makes_first(sample, tensor):
    x = tensor(1.0)
    places = [(m, r) for m in ("a", "b", "c") for r in ("input", "output", "grad_output")]
    calm = sample(5, dict.fromkeys(places, ("fp16", x)))
    share = {("b", "output"): 0.4, ("c", "input"): 1.0, ("c", "output"): 1.0}
    share |= {(m, "grad_output"): 1.0 for m in ("a", "b", "c")}
    bad = replace(
        calm,
        step=10,
        overflow=tuple(0.002 * (place == ("b", "input")) for place in places),
        nonfinite=tuple(share.get(place, 0.0) for place in places),
    )
    heat = heat_map([calm, bad])
    assert [(row["module"], row["role"]) for row in heat.worst[:7]] == [
        ("b", "input"),
        ("b", "output"),
        ("c", "input"),
        ("c", "output"),
        ("c", "grad_output"),
        ("b", "grad_output"),
        ("a", "grad_output"),
    ]
    assert {row["step"] for row in heat.worst[:7]} == {"10"}
    assert "the first non-finite one, at step 10, is the input of b in fp16" in heat.alt
    drawn = columns_of(heat, "snr_db", places.index(("c", "input")))
    assert drawn == [round(calm.snr_db[0], 1), BROKEN]


def test_saturation_is_the_worst_even_where_the_ratio_hides_it(growing):
    records = growing(range(10, 31, 10), ["a", "b"])
    snr = (31.0, 25.0, 31.0, 25.0)
    hidden = [replace(r, overflow=(0.002, 0.0, 0.0, 0.0), snr_db=snr) for r in records]
    heat = heat_map(hidden)
    assert (heat.worst[0]["module"], heat.worst[0]["role"]) == ("a", "input")
    assert heat.opens == "overflow"
    assert heat_map([replace(r, overflow=(0.0,) * 4) for r in hidden]).opens == "snr_db"
    assert heat_map([replace(r, snr_db=(31.0, 5.0, 31.0, 25.0)) for r in hidden]).opens == "snr_db"


def test_what_was_never_measured_and_what_is_not_finite_are_still_strict_json(sample, tensor):
    record = sample(
        1, {("a", "input"): ("fp32", tensor(1.0)), ("b", "input"): ("e4m3", tensor(1.0))}
    )
    broken = replace(record, step=2, snr_db=(None, math.nan), amax=(math.inf, math.nan))
    heat = heat_map([record, broken])
    assert json.dumps(heat.data, allow_nan=False)
    assert heat.data["measures"]["snr_db"][0] is None
    assert heat.worst[0]["snr"] == "not finite"
    assert heat.worst[0]["amax"] == "infinite"
    assert heat.worst[1]["snr"] == "–"


def test_a_row_that_never_changes_is_one_number(growing):
    heat = heat_map(growing(range(10, 301, 10), ["a", "b"]))
    assert heat.data["measures"]["overflow"][0] == 0
    assert isinstance(heat.data["measures"]["overflow"][2], list)


def test_one_sample_of_one_tensor_has_a_map(sample, tensor):
    heat = heat_map([sample(7, {("", "input"): ("e4m3", tensor(1.0))})])
    assert heat.data["edges"] == [6.5, 7.5]
    assert "the worst is the input of the model itself" in heat.alt
    assert heat.note == "Each column is one sampled step."


def test_nothing_sampled_is_no_map():
    assert heat_map([]) is None


def test_the_table_stops_at_a_dozen(growing):
    heat = heat_map(growing(range(10, 21, 10), [f"m{i}" for i in range(20)]))
    assert len(heat.worst) == WORST_TENSORS
    assert heat.modules == 20


@pytest.mark.parametrize("target", ["e4m3", "bf16"])
def test_records_in_any_order_give_the_same_map(target, sample, tensor):
    records = [sample(n, {("a", "input"): (target, tensor(n + 1.0))}) for n in range(5)]
    assert heat_map(records[::-1]) == heat_map(records)


def test_no_tensor_is_called_worst_where_no_cast_lost_anything():
    heat = heat_map([a_record(1, None, 0.0), a_record(2, None, 0.0)])
    assert heat.alt.endswith("sampled at 2 steps; no cast lost any values.")
