"""Strict JSON, in which nonfinite numbers are the strings inf, -inf and nan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Nonfinite numbers by their string."""


def dumps(value: object, *, indent: int | None = None) -> str:
    """Return `value` as JSON that every parser reads."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
    """Parse strict JSON; raise ValueError for a bare NaN or Infinity, or a lone surrogate."""
    value = json.loads(text, parse_constant=_raise_constant)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    return value


def _plain(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            # float() first: the repr of a subclass such as numpy.float64 differs.
            return repr(float(value))
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _raise_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
