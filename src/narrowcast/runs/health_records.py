"""Health records: many tensors per line, in columns with indices of names.

A line of 600 tensors is a third of its size as objects, and is read in about a millisecond.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.runs import strict_json
from narrowcast.runs.shape import LARGEST

NAMES = ("module", "role", "format")
SHARES = ("overflow", "underflow", "subnormal", "nonfinite")
NUMBERS = ("amax", "amin", *SHARES, "snr_db")

_LARGEST = 1.797e308


@dataclass(frozen=True, kw_only=True)
class HealthRecord:
    """Statistics of the tensors of one sampled step, one column per quantity.

    If casts to fp8 are counted, `amax`, `overflow` and `underflow` cover all steps since the
    previous record.
    """

    step: int
    module: tuple[str, ...]
    role: tuple[str, ...]
    """`input`, `weight`, `output`, `grad_output`, `grad_weight` or `update`."""
    format: tuple[str, ...]
    """The format the tensor was rounded to."""
    amax: tuple[float, ...]
    """The largest magnitude."""
    amin: tuple[float, ...]
    """The smallest magnitude above zero."""
    overflow: tuple[float, ...]
    """Share of elements above the largest value of the format."""
    underflow: tuple[float, ...]
    """Share of nonzero elements that rounded to zero."""
    subnormal: tuple[float, ...]
    """Share of elements that lost digits near zero."""
    nonfinite: tuple[float, ...]
    """Share of elements that were inf or NaN before any cast."""
    snr_db: tuple[float | None, ...]
    """Signal-to-noise ratio of the cast; None if nothing was cast or measured."""

    def __post_init__(self) -> None:
        """Raise for columns of different lengths, and for shares outside 0 to 1."""
        lengths = {name: len(getattr(self, name)) for name in (*NAMES, *NUMBERS)}
        if len(set(lengths.values())) > 1:
            message = ", ".join(f"{name} {n}" for name, n in lengths.items())
            raise ValueError(f"columns must have the same length, got {message}")
        for name in SHARES:
            column = getattr(self, name)
            # min and max skip nothing but NaN, which no comparison finds.
            if column and not (0 <= min(column) <= max(column) <= 1 and sum(column) >= 0):
                raise ValueError(f"{name} must be shares from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class ExponentRecord:
    """Histogram of the exponents of one tensor, after any scale and before the cast."""

    step: int
    module: str
    role: str
    format: str
    lowest: int
    """The first bin counts magnitudes from 2**lowest to below 2**(lowest + 1), and so on."""
    counts: tuple[int, ...]


def health_line(record: HealthRecord, *, kind: str) -> str:
    """Return `record` as one line of strict JSON, with four digits per number."""
    head: dict[str, object] = {"kind": kind, "step": record.step}
    for name in NAMES:
        column = getattr(record, name)
        places = {text: location for location, text in enumerate(dict.fromkeys(column))}
        head[f"{name}s"] = list(places)
        head[name] = [places[text] for text in column]
    columns = "".join(f',"{name}":[{_written(getattr(record, name))}]' for name in NUMBERS)
    return f"{json.dumps(head, separators=(',', ':'))[:-1]}{columns}}}"


def health_from_json(results: dict[str, Any]) -> HealthRecord:
    """Return the record of such a line; raise KeyError or TypeError otherwise."""
    step = results.pop("step", None)
    if type(step) is not int or abs(step) > LARGEST:
        raise TypeError("step is not a whole number")
    values: dict[str, Any] = {name: _texts(name, results) for name in NAMES}
    values |= {name: _numbers(name, _column(name, results)) for name in NUMBERS}
    if results:
        raise KeyError(f"{min(results)} is not a known field")
    try:
        return HealthRecord(step=step, **values)
    except ValueError as error:
        raise TypeError(str(error)) from None


def _written(column: Sequence[float | None]) -> str:
    # Written by json, from numbers rounded one by one, a line takes three times as long.
    if None not in column and sum(map(abs, column)) < _LARGEST:  # type: ignore[arg-type]
        text = ",".join(["%.4g"] * len(column)) % tuple(column)
        # Only a negative zero is written so, and it would be read back as a whole number.
        if "-0," not in f"{text},":
            return text
    return ",".join(_word(x) for x in column)


def _word(x: float | None) -> str:
    if x is None:
        return "null"
    if not math.isfinite(x):
        return f'"{float(x)!r}"'
    # Four digits of the largest floats are beyond them.
    return f"{x or 0.0:.4g}" if abs(x) < _LARGEST else repr(math.copysign(_LARGEST, x))


def _column(name: str, result: dict[str, Any]) -> list[Any]:
    if name not in result:
        raise KeyError(f"{name} is missing")
    column = result.pop(name)
    if not isinstance(column, list):
        raise TypeError(f"{name} is not a list")
    return column


def _texts(name: str, matched: dict[str, Any]) -> tuple[str, ...]:
    texts, places = _column(f"{name}s", matched), _column(name, matched)
    if not set(map(type, texts)) <= {str}:
        raise TypeError(f"{name}s are not text")
    # A negative place would count from the end.
    if not set(map(type, places)) <= {int} or (places and min(places) < 0):
        raise TypeError(f"{name} is not a list of indices into {name}s")
    if places and max(places) >= len(texts):
        raise TypeError(f"{name} has an index beyond {name}s")
    return tuple(map(texts.__getitem__, places))


def _numbers(name: str, column: Sequence[Any]) -> tuple[float | None, ...]:
    kinds = set(map(type, column))
    if kinds <= {float}:
        return tuple(column)
    if kinds <= {float, int}:
        return tuple(map(float, column))
    if not kinds <= {float, int, str, type(None)} or (name != "snr_db" and type(None) in kinds):
        raise TypeError(f"{name} has a value that is not a number")
    return tuple(_number(name, x) for x in column)


def _number(name: str, x: float | str | None) -> float | None:
    if isinstance(x, str):
        if x not in strict_json.NONFINITE:
            raise TypeError(f"{name} has a value that is not a number")
        return strict_json.NONFINITE[x]
    return None if x is None else float(x)
