from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Optional

import pytest
from pydantic import Field

from narrowcast.config.tree import entry_type, fitted, takes_text


@pytest.mark.parametrize(
    ("value", "annotation", "result"),
    [
        (1e3, int, 1000),
        (1e3, int | None, 1000),
        (1e3, Annotated[int, Field(ge=1)] | None, 1000),
        (1e3, float, 1e3),
        (1e3, int | float, 1e3),
        (1.5, int, 1.5),
        (2.0**54, int, 2.0**54),
        ("none", float | None, None),
        ("Null", Optional[str], None),  # noqa: UP045
        ("none", str, "none"),
        ("none", Literal["none", "fp32"] | None, "none"),
        ([1e1, 2.0], list[int], [10, 2]),
        ([1e1, 2.0], tuple[int, float], [10, 2.0]),
        ([1e1, 2.0, 3.0], tuple[int, ...], [10, 2, 3]),
        ([1.0, 2.0, 3.0], tuple[int, int], [1, 2, 3.0]),
        ({"a": 1e1}, dict[str, int], {"a": 10}),
        ({"a": "none"}, Mapping[str, int | None], {"a": None}),
        ([1.0], int, [1.0]),
    ],
)
def test_a_value_is_fitted_only_where_that_loses_nothing(value, annotation, result):
    found = fitted(value, annotation)
    assert found == result
    assert repr(found) == repr(result)


@pytest.mark.parametrize(
    ("value", "annotation", "text"),
    [
        (8, str, True),
        ({"a": "b"}, str, True),
        (8, Path | None, True),
        (None, Path | None, False),
        (None, str, True),
        (8, str | int, False),
        ([1], str | list[int], False),
        (8, int, False),
        (True, Literal["a", "b"], True),
    ],
)
def test_a_word_is_taken_as_text_where_its_setting_takes_nothing_else_it_could_be(
    value, annotation, text
):
    assert takes_text(value, annotation) is text


def test_a_mapping_is_recognised_among_other_options():
    assert entry_type(dict[str, str] | None) is str
    assert entry_type(str | None) is None
