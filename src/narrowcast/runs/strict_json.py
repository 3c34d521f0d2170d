"""Strict JSON, in which nonfinite numbers are the strings inf, -inf and nan."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowcast.plain_files import open_plain
from narrowcast.runs import strict_json

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


def peek_json(path: Path, *, most_bytes: int) -> Any:
    """Return the content of `path`, or None if it is missing, too large or not JSON."""
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                return None
            return strict_json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None
