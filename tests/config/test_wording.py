import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.config.problems import LONGEST_VALUE, closest, shown


@pytest.mark.parametrize(
    ("word", "name"),
    [("stesp", "steps"), ("STEPS", "steps"), ("batch-size", "batch_size"), ("xyzzy", None)],
)
def test_the_closest_name_is_found(word, name):
    assert closest(word, ["seed", "steps", "batch_size"]) == name


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "none"), (True, "true"), (1e-4, "0.0001"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_values_are_shown_as_they_are_written_in_a_recipe(value, text):
    assert shown(value) == text


@given(st.text() | st.lists(st.integers() | st.text()) | st.floats() | st.integers())
def test_what_is_shown_is_one_short_line(value):
    text = shown(value)
    assert len(text) <= LONGEST_VALUE
    assert "\n" not in text
