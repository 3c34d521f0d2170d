import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.config.yaml_text import YamlError, parse, parse_scalar

# Every way §10.3.2 of the YAML 1.2.2 specification allows to write these two numbers.
ONE_TENTHOUSANDTH = ["1e-4", "1E-4", "1.e-4", "1.0e-4", "1.0E-4", ".1e-3", "+1e-4", "0.0001"]
ONE_HUNDRED = ["1e2", "1e+2", "1E2", "1.e2", "1.0e+2", ".1e3", ".1E+3", "+1.0E02", "100.0"]

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | PRINTABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PRINTABLE, inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("text", ONE_TENTHOUSANDTH)
def test_one_tenthousandth_is_a_number_however_it_is_written(text):
    assert parse(f"lr: {text}").value == {"lr": 1e-4}


@pytest.mark.parametrize("text", ONE_HUNDRED)
def test_one_hundred_is_a_float_however_it_is_written(text):
    value = parse(f"lr: {text}").value
    assert value == {"lr": 100.0}
    assert isinstance(value["lr"], float)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # The table of the core schema, YAML 1.2.2 §10.3.2.
        *[(text, None) for text in ("null", "Null", "NULL", "~", "")],
        *[(text, True) for text in ("true", "True", "TRUE")],
        *[(text, False) for text in ("false", "False", "FALSE")],
        *[("0", 0), ("-19", -19), ("+12", 12), ("0o14", 12), ("0xFf", 255), ("010", 10)],
        *[(".inf", math.inf), ("-.Inf", -math.inf), ("+.INF", math.inf)],
        # Text in 1.2, though 1.1 or Python would read something else.
        *[(text, text) for text in ("yes", "no", "on", "1_000", "inf", "nan", "1:30", "e4m3")],
        *[(text, text) for text in ("0b11", "-0x1", "1e", "e4", ".", "+", "2024-01-01", "1.2.3")],
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_nan_is_written_with_a_dot(text):
    assert math.isnan(parse_scalar(text))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_python_floats_are_read_back_exactly(number):
    assert parse_scalar(repr(number)) == number


@given(JSON)
def test_json_is_yaml_with_the_same_meaning(value):
    document = parse(json.dumps(value))
    assert document.value == value
    assert document.problems == []


def test_an_integer_of_ten_thousand_digits_is_not_finite():
    assert parse_scalar("9" * 10_000) == math.inf


def test_every_key_has_its_line():
    document = parse("# first\na: 1\nb:\n  c: 2\n\n  d: {e: 3}\n")
    lines = {".".join(path): line for path, line in document.lines.items()}
    assert lines == {"a": 2, "b": 3, "b.c": 4, "b.d": 6, "b.d.e": 6}


def test_a_key_given_twice_is_a_problem_with_both_lines():
    document = parse("b:\n  a: 1\n  c: 3\n  a: 2\n")
    assert document.problems == [(4, "b.a is set twice, also in line 2. Keep one of them")]


def test_quoted_and_tagged_numbers_are_text():
    assert parse("[\"1e-4\", '3', !!str 3, !!str true]").value == ["1e-4", "3", "3", "true"]


@pytest.mark.parametrize("tag", ["!python/object:os.system", "!!python/name:os.system", "!!binary"])
def test_tags_are_refused_and_never_obeyed(tag):
    document = parse(f"a: {tag} aGk=")
    assert document.value == {"a": "aGk="}
    assert "is not supported. Leave it out" in document.problems[0][1]


def test_aliases_stand_for_their_anchor_and_the_later_of_two_counts():
    assert parse("a: &x 1\nb: &x 2\nc: *x\n").value == {"a": 1, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a:\n\tb: 1\n", 2, "a tab is used for indentation"),
        ("a: b: c\n", 1, "a line has two colons. Put the value in quotes"),
        ("a: 1\nb: {*.norm: fp32}\n", 2, r'must be in quotes. Write e.g. "\*.norm"'),
        ("*.norm: fp32\n", 1, r'must be in quotes. Write e.g. "\*.norm"'),
        ("a: *b\n", 1, "must be in quotes"),
        ("a: 1\n---\nb: 2\n", 2, "must hold one recipe, got a second document"),
        ("a: @b\n", 1, "Put the value in quotes"),
        ("a: [1, 2\n", 2, "not YAML: "),
        ("a: \x01\n", 1, "not YAML: "),
        ("a: &x [*x]\n", 1, "nested too deeply"),
        ("a: " + "[" * 20_000, 1, "nested too deeply"),
    ],
)
def test_what_is_not_yaml_is_refused_with_its_line_and_advice(text, line, message):
    with pytest.raises(YamlError, match=message) as caught:
        parse(text)
    assert caught.value.line == line


def test_a_key_that_is_a_list_is_a_problem():
    assert parse("? [a]\n: 1\n").problems == [
        (1, "a key must be one word, not a list or a mapping")
    ]


def test_only_brackets_that_open_a_list_are_counted_as_nesting():
    lines = ["# lr in [0, 1)"] * 101 + ["a: '" + "[" * 200 + "'", "b: [[1], {c: [2]}]"]
    assert parse("\n".join(lines)).value == {"a": "[" * 200, "b": [[1], {"c": [2]}]}
    with pytest.raises(YamlError, match="nested too deeply"):
        parse("[" * 101 + "]" * 101)
