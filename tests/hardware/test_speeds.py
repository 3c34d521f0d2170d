"""Measured speeds: a table, what lies between its points, and where it is kept."""

import dataclasses
import itertools
import json
import math
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists

from narrowcast.hardware import Speeds, keep_speeds
from narrowcast.hardware import speeds as module
from narrowcast.hardware.speeds import FROZEN, KINDS, TOKENS, WIDTHS, known_speeds

GRID = (16, 64), (32, 128, 512), (32, 64)
SHAPES = list(itertools.product(*GRID))


def table(ratios, *, gpu="NVIDIA Imaginary 9000"):
    """bf16 over fp8 is `ratios`, in the order of the shapes."""
    wide = tuple(0.5 + 0.25 * i for i in range(len(SHAPES)))
    narrow = tuple(w / r for w, r in zip(wide, ratios, strict=True))
    return Speeds(
        gpu=gpu,
        torch="2.13.0",
        date="2026-01-31",
        tokens=GRID[0],
        inputs=GRID[1],
        outputs=GRID[2],
        seconds={"bf16": wide, "tensor": narrow, "delayed": tuple(n / 2 for n in narrow)},
    )


RATIOS = [0.5 + 0.1 * i for i in range(len(SHAPES))]
SOME = table(RATIOS)
sizes = integers(1, 10_000)


def gain(made, shape, kind="tensor"):
    tokens, inputs, outputs = shape
    return made.gain(kind, tokens=tokens, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(("shape", "ratio"), list(zip(SHAPES, RATIOS, strict=True)))
def test_at_a_measured_shape_the_gain_is_the_ratio_of_its_times(shape, ratio):
    assert gain(SOME, shape) == pytest.approx(ratio)
    assert gain(SOME, shape, "delayed") == pytest.approx(2 * ratio)


@given(tokens=sizes, inputs=sizes, outputs=sizes)
def test_a_gain_between_measured_shapes_lies_between_their_gains(tokens, inputs, outputs):
    """And beyond the ends it is that of the end: each axis has a place below and one above."""
    around = []
    for axis, value in zip(GRID, (tokens, inputs, outputs), strict=True):
        below = max([a for a in axis if a <= value], default=axis[0])
        around.append((below, min([a for a in axis if a >= value], default=axis[-1])))
    corners = [gain(SOME, shape) for shape in itertools.product(*around)]
    found = gain(SOME, (tokens, inputs, outputs))
    assert min(corners) * (1 - 1e-12) <= found <= max(corners) * (1 + 1e-12)


def test_half_way_between_two_shapes_on_a_scale_of_factors_is_their_geometric_mean():
    at_ends = gain(SOME, (16, 32, 32)), gain(SOME, (16, 128, 32))
    assert gain(SOME, (16, 64, 32)) == pytest.approx(math.sqrt(math.prod(at_ends)))


@given(beyond=integers(1, 2**40))
def test_beyond_the_ends_the_gain_is_that_of_the_end(beyond):
    assert gain(SOME, (64 + beyond, 512 + beyond, 64 + beyond)) == gain(SOME, (64, 512, 64))
    least = gain(SOME, (16, 32, 32))
    assert gain(SOME, (max(1, 16 - beyond), max(1, 32 - beyond), max(1, 32 - beyond))) == least


@given(factor=floats(0.1, 10), ratios=lists(floats(0.1, 10), min_size=12, max_size=12))
def test_a_gpu_that_is_as_much_faster_in_both_gains_as_much(factor, ratios):
    made = table(ratios)
    seconds = {kind: tuple(s * factor for s in times) for kind, times in made.seconds.items()}
    scaled = Speeds(**{**vars(made), "seconds": seconds})
    assert gain(scaled, (40, 99, 50)) == pytest.approx(gain(made, (40, 99, 50)))


@pytest.mark.parametrize("kind", ["row", "block", "none", ""])
def test_what_was_not_measured_has_no_gain(kind):
    assert gain(SOME, (16, 32, 32), kind) is None


def test_json_carries_a_table_there_and_back():
    assert Speeds.from_json(json.loads(json.dumps(SOME.to_json()))) == SOME


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_gpu_that_nobody_measured_has_no_speeds(cache):
    assert known_speeds("NVIDIA Imaginary 9000") is None


def test_what_is_kept_is_found_again_by_the_name_of_the_gpu_and_by_no_other(cache):
    path = keep_speeds(SOME)
    assert path.is_relative_to(cache)
    assert known_speeds(SOME.gpu) == SOME
    assert known_speeds("NVIDIA Imaginary 900") is None


@pytest.mark.parametrize("name", ["A/B: c", "../../x", "NVIDIA GeForce RTX™ 4090 (Laptop)"])
def test_a_name_with_odd_characters_stays_inside_the_cache_folder(cache, name):
    kept = table(RATIOS, gpu=name)
    assert keep_speeds(kept).resolve().is_relative_to((cache / "narrowcast" / "speeds").resolve())
    assert known_speeds(name) == kept


def test_a_second_measurement_takes_the_place_of_the_first(cache):
    keep_speeds(SOME)
    again = table(list(reversed(RATIOS)))
    keep_speeds(again)
    assert known_speeds(SOME.gpu) == again


DAMAGE = {
    "empty": "",
    "cut off": json.dumps(SOME.to_json())[:-40],
    "no table": "[]",
    "a word": '"fast"',
    "no seconds": json.dumps({**SOME.to_json(), "seconds": {}}),
    "no bf16": json.dumps({**SOME.to_json(), "seconds": {"tensor": [1.0] * len(SHAPES)}}),
    "a shape less": json.dumps({**SOME.to_json(), "seconds": {"bf16": [1.0] * 11}}),
    "no time": json.dumps({**SOME.to_json(), "seconds": {"bf16": [0.0] * len(SHAPES)}}),
    "words": json.dumps({**SOME.to_json(), "seconds": {"bf16": ["1"] * len(SHAPES)}}),
    "an axis out of order": json.dumps({**SOME.to_json(), "tokens": [64, 16]}),
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_left_out_with_what_to_do(cache, caplog, text):
    keep_speeds(SOME).write_text(text)
    assert known_speeds(SOME.gpu) is None
    assert "narrowcast doctor --measure" in caplog.text


def test_a_table_with_fewer_kinds_and_shapes_is_read_as_it_is(cache):
    few = Speeds(**{**vars(SOME), "seconds": {"bf16": SOME.seconds["bf16"]}})
    keep_speeds(few)
    assert known_speeds(SOME.gpu) == few
    assert gain(few, (16, 32, 32), "row") is None


@pytest.fixture
def shipped(cache, tmp_path, monkeypatch):
    """A package that comes with the table of one GPU."""
    package = tmp_path / "package"
    (package / "measured").mkdir(parents=True)
    made = table(RATIOS, gpu="NVIDIA H200")
    (package / "measured" / "h200.json").write_text(json.dumps(made.to_json()))
    (package / "measured" / ".gitkeep").touch()
    monkeypatch.setattr(module, "files", lambda package_name: package)
    return made


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3"])
def test_a_table_of_the_package_serves_the_gpu_and_those_with_its_processor(shipped, gpu):
    assert known_speeds(gpu) == shipped


@pytest.mark.parametrize("gpu", ["NVIDIA A100", "NVIDIA B200", "H200"])
def test_a_table_of_the_package_does_not_serve_other_gpus(shipped, gpu):
    assert known_speeds(gpu) is None


def test_what_was_measured_here_wins_over_what_comes_with_the_package(shipped):
    mine = table(list(reversed(RATIOS)), gpu="NVIDIA H200")
    keep_speeds(mine)
    assert known_speeds("NVIDIA H200") == mine != shipped


def test_tables_that_come_with_the_package_are_whole():
    """Every file can be read, has all shapes, and no time that cannot have been measured."""
    for path in files("narrowcast.hardware").joinpath("measured").iterdir():
        if not path.name.endswith(".json"):
            continue
        made = Speeds.from_json(json.loads(path.read_text(encoding="utf-8")))
        assert (made.tokens, made.inputs, made.outputs) == (TOKENS, WIDTHS, WIDTHS)
        # Frozen weights are measured by newer tables only; a plan says where it does not know.
        assert set(KINDS) - set(FROZEN) <= set(made.seconds) <= set(KINDS)
        for times in made.seconds.values():
            assert len(times) == len(TOKENS) * len(WIDTHS) ** 2
            assert all(0 < t < 1 for t in times)


ONE = {"tokens": 16, "inputs": 32, "outputs": 32}


@pytest.mark.parametrize(
    ("wide", "narrow", "host", "plain", "late"),
    [
        (10.0, 5.0, 4.0, 1.0, False),  # saves more than it costs
        (10.0, 9.0, 8.0, 1.0, True),  # saves less, and the device would wait
        (10.0, 9.0, 5.5, 1.0, False),  # saves less, but the device is busy
        (1.0, 2.0, 3.0, 1.0, True),
    ],
)
def test_a_layer_is_waited_for_where_the_host_loses_more_than_the_device_saves(
    wide, narrow, host, plain, late
):
    made = table([1.0] * len(SHAPES))
    seconds = {"bf16": (wide,) * len(SHAPES), "tensor": (narrow,) * len(SHAPES)}
    hosts = {"bf16": plain, "tensor": host}
    made = dataclasses.replace(made, seconds=seconds, host_seconds=hosts)
    assert made.waited_for("tensor", **ONE) is late
    assert Speeds.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_of_a_host_that_nobody_measured_nothing_is_said():
    assert SOME.waited_for("tensor", **ONE) is None
    old = {name: value for name, value in SOME.to_json().items() if name != "host_seconds"}
    assert Speeds.from_json(old) == SOME


def test_a_host_that_takes_no_time_is_refused():
    with pytest.raises(ValueError, match="impossible times"):
        Speeds.from_json(SOME.to_json() | {"host_seconds": {"bf16": 0.0}})


def test_what_a_captured_layer_costs_the_host_is_not_waited_for():
    hosts = {"bf16": 1.0, "tensor": 1e6}
    made = dataclasses.replace(SOME, host_seconds=hosts)
    found = [made.waited_for("tensor", **ONE, execution=each) for each in ("eager", "graphed")]
    assert found == [True, False]
