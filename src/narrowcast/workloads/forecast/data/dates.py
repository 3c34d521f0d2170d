"""Dates of rows: parsed, checked for one frequency, continued into the future."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError

Dates = npt.NDArray[Any]
"""datetime64[ns], or int64 where rows are numbered."""

DAY = 86_400 * 10**9
_UNITS = {"W": 7 * DAY, "D": DAY, "h": DAY // 24, "min": 60 * 10**9, "s": 10**9, "ms": 10**6}
_TIME = (
    r"(?:[T ]+(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.(?P<fraction>\d{1,9}))?)?"
    r" ?(?P<half>[AaPp][Mm])?(?P<zone> ?(?:Z|UTC|[+-]\d\d:?(?:\d\d)?))?)?"
)
_YEAR_FIRST = re.compile(
    r"(?P<year>\d{4})(?P<sign>[-/.])(?P<month>\d{1,2})(?:(?P=sign)(?P<day>\d{1,2}))?" + _TIME
)
_YEAR_LAST = re.compile(
    r"(?P<first>\d{1,2})(?P<sign>[-/.])(?P<second_part>\d{1,2})(?P=sign)(?P<year>\d{4})" + _TIME
)
_MISSING = frozenset({"", "NaT", "nat", "NaN", "nan", "None", "none", "null", "NA", "<NA>"})
_ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?")


def looks_like_date(value: Any) -> bool:
    """Return whether a value is a date, or text of one."""
    if isinstance(value, datetime | np.datetime64):
        return True
    text = str(value).strip()
    return bool(_YEAR_FIRST.fullmatch(text) or _YEAR_LAST.fullmatch(text))


def parse_dates(
    cells: Dates, row_label: Callable[[int], str], *, name: str, date_format: str | None = None
) -> Dates:
    """Return a column of dates as datetime64[ns], or numbers as int64.

    Times with a zone become UTC. Where all are midnight, they are taken as dates.

    Raises:
        ConfigError: a date is missing or has another format or zone than the others.
    """
    cells = np.asarray(cells)
    if cells.dtype.kind == "M":
        if (missing := np.isnat(cells)).any():
            raise _missing(row_label(int(missing.argmax())), name)
        return cells.astype("datetime64[ns]")
    if cells.dtype.kind in "iu":
        return _numbered(cells.astype(np.int64))
    if cells.dtype.kind == "f":
        if (strange := ~(np.isfinite(cells) & (cells == np.floor(cells)))).any():
            row = int(strange.argmax())
            raise ConfigError(
                f"{row_label(row)}: column {name!r} must have dates or whole numbers, got "
                f"{cells[row]}. Correct it."
            )
        return _numbered(cells.astype(np.int64))
    texts = [str(cell).strip() for cell in cells.tolist()]
    for row in sorted(texts.index(text) for text in _MISSING & set(texts)):
        raise _missing(row_label(row), name)
    if date_format is not None:
        return _strptime(texts, row_label, name, date_format)
    if all(text.isdigit() for text in texts):
        return _numbered(np.array(texts, dtype=np.int64))
    return _parse(texts, row_label, name)


def _missing(row: str, name: str) -> ConfigError:
    return ConfigError(f"{row} has no date in column {name!r}. Remove the row, or add its date.")


def _numbered(numbers: Dates) -> Dates:
    """Return whole numbers, or dates where all of them are written like 20160701."""
    if numbers.size and ((numbers >= 1900_01_01) & (numbers <= 2199_12_31)).all():
        years, months, days = numbers // 10_000, numbers // 100 % 100, numbers % 100
        if ((months >= 1) & (months <= 12) & (days >= 1) & (days <= 31)).all():
            dates = _assembled(years, months, days)
            if (_year_month_day(dates)[2] == days).all():
                return dates
    return numbers


def _strptime(
    texts: Sequence[str], row_label: Callable[[int], str], name: str, date_format: str
) -> Dates:
    parsed: dict[str, datetime] = {}
    for row, text in enumerate(texts):
        if text in parsed:
            continue
        try:
            date = datetime.strptime(text, date_format)
        except ValueError as error:
            raise ConfigError(
                f"{row_label(row)}: column {name!r} does not match "
                f"date_format={date_format!r}, got {shortened(text)!r}. {error}."
            ) from None
        parsed[text] = date if date.tzinfo is None else date.astimezone(UTC).replace(tzinfo=None)
    return np.array([parsed[text] for text in texts], dtype="datetime64[ns]")


def _parse(texts: Sequence[str], row_label: Callable[[int], str], name: str) -> Dates:
    """Parse dates that are all written in one way."""
    joined = "".join(texts)
    # numpy takes only ISO dates, but also "now" and years alone, which are shorter.
    equally_long = set(map(len, texts)) == {len(texts[0])}
    if equally_long and _ISO.fullmatch(texts[0]) and "+" not in joined and "Z" not in joined:
        with suppress(ValueError):  # below is a message with the row
            return np.array(texts).astype("datetime64[s]").astype("datetime64[ns]")
    pattern = _YEAR_FIRST if _YEAR_FIRST.fullmatch(texts[0]) else _YEAR_LAST
    matches = [pattern.fullmatch(text) for text in texts]
    head = matches[0]
    for row, each in enumerate(matches):
        if each is None or head is None or each["sign"] != head["sign"]:
            example = f" as {texts[0]!r} in {row_label(0)}" if row else ""
            raise ConfigError(
                f"{row_label(row)}: column {name!r} must have dates in one format{example}, got "
                f"{shortened(texts[row])!r}. Write all as 2016-07-01 00:00:00, or name their "
                "format with date_format, such as '%d %b %Y'."
            )
    assert head is not None
    parts = [each.groupdict() for each in matches if each is not None]
    _check_zones(parts, row_label, name)

    def numbers(key: str, default: int = 0) -> Dates:
        return np.array([int(each[key] or default) for each in parts], dtype=np.int64)

    if pattern is _YEAR_FIRST:
        months, days = numbers("month"), numbers("day", 1)
    else:
        months, days = _month_and_day(
            numbers("first"), numbers("second_part"), texts[0], name, row_label
        )
    hours = numbers("hour")
    if any(each["half"] for each in parts):
        late = np.array([(each["half"] or "").lower() == "pm" for each in parts])
        hours = hours % 12 + 12 * late
    dates = _assembled(numbers("year"), months, days)
    wrong = (months < 1) | (months > 12) | (_year_month_day(dates)[2] != days)
    wrong |= (hours > 23) | (numbers("minute") > 59) | (numbers("second") > 59)
    if wrong.any():
        row = int(wrong.argmax())
        raise ConfigError(
            f"{row_label(row)}: column {name!r} must have dates of the calendar, got "
            f"{shortened(texts[row])!r}. Correct it, or name the format with date_format."
        )
    fraction = np.array([int((each["fraction"] or "").ljust(9, "0")) for each in parts])
    nanoseconds = (hours * 3600 + numbers("minute") * 60 + numbers("second")) * 10**9 + fraction
    offsets = np.array([_zone_seconds(each["zone"]) for each in parts], dtype=np.int64)
    if not nanoseconds.any():
        offsets = np.zeros_like(offsets)  # in UTC, days of a zone would not be 24 hours apart
    shifts = (nanoseconds - offsets * 10**9).astype("timedelta64[ns]")
    return np.asarray(dates + shifts)


def _month_and_day(
    first: Dates, second: Dates, text: str, name: str, row_label: Callable[[int], str]
) -> tuple[Dates, Dates]:
    """Return months and days of dates such as 13/01/2016, whichever is written first."""
    sign = next(letter for letter in text if not letter.isdigit())
    day_first, month_first = first > 12, second > 12
    if day_first.any() and month_first.any():
        raise ConfigError(
            f"Column {name!r} must have dates in one format, got the day first in "
            f"{row_label(int(day_first.argmax()))} and the month first in "
            f"{row_label(int(month_first.argmax()))}. Write all as 2016-07-01."
        )
    if day_first.any() or (sign == "." and not month_first.any()):
        return second, first
    if month_first.any():
        return first, second
    raise ConfigError(
        f"{row_label(0)}: column {name!r} may have the day or the month first, got "
        f"{shortened(text)!r}. Write date_format='%d{sign}%m{sign}%Y' or "
        f"'%m{sign}%d{sign}%Y'."
    )


def _check_zones(
    parts: Sequence[Mapping[str, Any]], row_label: Callable[[int], str], name: str
) -> None:
    """Check that all dates have a time zone, or none."""
    zoned = [each["zone"] is not None for each in parts]
    if any(zoned) and not all(zoned):
        raise ConfigError(
            f"Column {name!r} must have a time zone in all rows or in none, got one in "
            f"{row_label(zoned.index(True))} and none in {row_label(zoned.index(False))}. Write "
            "all times in UTC."
        )


def _zone_seconds(zone: str | None) -> int:
    digits = (zone or "").strip().replace(":", "").removeprefix("UTC").removeprefix("Z")
    if not digits:
        return 0
    seconds = int(digits[1:3]) * 3600 + int(digits[3:5] or 0) * 60
    return -seconds if digits[0] == "-" else seconds


def _assembled(years: Dates, months: Dates, days: Dates) -> Dates:
    month = ((years - 1970) * 12 + months - 1).astype("datetime64[M]")
    dates = month.astype("datetime64[D]") + (days - 1).astype("timedelta64[D]")
    return np.asarray(dates.astype("datetime64[ns]"))


def _year_month_day(dates: Dates) -> tuple[Dates, Dates, Dates]:
    months = dates.astype("datetime64[M]")
    number = months.astype(np.int64)
    day = (dates.astype("datetime64[D]") - months.astype("datetime64[D]")).astype(np.int64) + 1
    return number // 12 + 1970, number % 12 + 1, day


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """The time between two rows: a fixed time, months, business days, or a whole number."""

    count: int
    """Nanoseconds, months, business days, or the difference of row numbers."""
    kind: Literal["fixed", "month start", "month end", "month", "business", "number"]

    @classmethod
    def parse(cls, text: str) -> Step:
        """Return the step that `text` names, such as 15min, 1h, 1D, 1W, 1MS, 1ME, 1B or 1."""
        match = re.fullmatch(r"(\d*)(W|D|d|h|H|min|T|s|S|ms|MS|ME|M|QS|Q|YS|Y|B|)", text.strip())
        if match is None or match[0] == "" or match[1].strip("0") == "" != match[1]:
            raise ConfigError(
                f"step must be a frequency such as 15min, 1h, 1D, 1W, 1MS (month start), 1ME "
                f"(month end), 1B (business day) or 1 (numbered rows), got {text!r}."
            )
        count, unit = int(match[1] or 1), match[2]
        unit = {"d": "D", "H": "h", "T": "min", "S": "s"}.get(unit, unit)
        if unit in _UNITS:
            return cls(count=count * _UNITS[unit], kind="fixed")
        months = {"MS": 1, "ME": 1, "M": 1, "QS": 3, "Q": 3, "YS": 12, "Y": 12}
        if unit in months:
            kind: Any = {"ME": "month end", "M": "month"}.get(unit, "month start")
            return cls(count=count * months[unit], kind=kind)
        return cls(count=count, kind="business" if unit == "B" else "number")

    def __str__(self) -> str:
        match self.kind:
            case "number":
                return str(self.count)
            case "business":
                return f"{self.count}B"
            case "fixed":
                for unit, length in _UNITS.items():
                    if self.count % length == 0:
                        return f"{self.count // length}{unit}"
                return f"{self.count}ns"
        return f"{self.count}{ {'month start': 'MS', 'month end': 'ME'}.get(self.kind, 'M') }"

    def index(self, dates: Dates) -> Dates:
        """Return how many steps each date is after the first, -1 where it is between two."""
        first = dates[:1]
        if self.kind in ("fixed", "number"):
            gaps = (dates - first).astype(np.int64)
            return np.where(gaps % self.count == 0, gaps // self.count, -1)
        if self.kind == "business":
            days = dates.astype("datetime64[D]")
            number = np.busday_count(first.astype("datetime64[D]"), days)
            fits = np.is_busday(days) & (_time_of_day(dates) == _time_of_day(first))
            return np.where(fits & (number % self.count == 0), number // self.count, -1)
        number = dates.astype("datetime64[M]").astype(np.int64)
        number = number - number[:1]
        fits = (number % self.count == 0) & (_time_of_day(dates) == _time_of_day(first))
        days = _year_month_day(dates)[2]
        last = _month_lengths(dates)
        match self.kind:
            case "month start":
                fits &= days == 1
            case "month end":
                fits &= days == last
            case _:
                fits &= days == np.minimum(days[:1], last)
        return np.where(fits, number // self.count, -1)

    def after(self, date: Any, steps: Dates) -> Dates:
        """Return the dates that are some steps after `date`."""
        if self.kind == "number":
            return np.asarray(int(date) + steps * self.count, dtype=np.int64)
        date = np.datetime64(date, "ns")
        if self.kind == "fixed":
            return np.asarray(date + (steps * self.count).astype("timedelta64[ns]"))
        day = date.astype("datetime64[D]")
        time = date - day.astype("datetime64[ns]")
        if self.kind == "business":
            days = np.busday_offset(day, steps * self.count, roll="forward")
            return np.asarray(days.astype("datetime64[ns]") + time)
        months = day.astype("datetime64[M]") + (steps * self.count).astype("timedelta64[M]")
        starts = months.astype("datetime64[D]").astype("datetime64[ns]")
        lengths = _month_lengths(starts)
        number = int(_year_month_day(np.array([date]))[2][0])
        if self.kind == "month start":
            lengths = np.ones_like(lengths)
        elif self.kind == "month":
            lengths = np.minimum(number, lengths)
        return np.asarray(starts + ((lengths - 1) * DAY).astype("timedelta64[ns]") + time)


def _time_of_day(dates: Dates) -> Dates:
    return np.asarray(dates - dates.astype("datetime64[D]").astype("datetime64[ns]"))


def _month_lengths(dates: Dates) -> Dates:
    months = dates.astype("datetime64[M]")
    following = (months + 1).astype("datetime64[D]")
    return np.asarray((following - months.astype("datetime64[D]")).astype(np.int64))


def infer_step(series: Sequence[Dates]) -> Step | None:
    """Return the step that most rows have; None if no series has two rows.

    Args:
        series: sorted dates without repetitions, one array per series.
    """
    series = [dates for dates in series if len(dates) > 1]
    if not series:
        return None
    gaps = np.concatenate([np.diff(dates).astype(np.int64) for dates in series])
    lengths, counts = np.unique(gaps, return_counts=True)
    usual = int(lengths[counts.argmax()])
    if series[0].dtype.kind != "M":
        return Step(count=usual, kind="number")
    dates = np.concatenate(series)
    if usual >= 28 * DAY and int(gaps.min()) >= 28 * DAY:
        days, last = _year_month_day(dates)[2], _month_lengths(dates)
        months = np.concatenate(
            [np.diff(each.astype("datetime64[M]").astype(np.int64)) for each in series]
        )
        numbers, counts = np.unique(months, return_counts=True)
        count = int(numbers[counts.argmax()])
        if (days == 1).all():
            return Step(count=count, kind="month start")
        if (days == last).all():
            return Step(count=count, kind="month end")
        if count and (days == np.minimum(days.max(), last)).all():
            return Step(count=count, kind="month")
    weekends_left_out = usual == DAY and (lengths == 3 * DAY).any()
    if weekends_left_out and np.is_busday(dates.astype("datetime64[D]")).all():
        return Step(count=1, kind="business")
    return Step(count=usual, kind="fixed")


CALENDAR = ("minute of hour", "hour of day", "day of week", "day of month", "day of year")
"""Calendar features, each from -0.5 to 0.5."""


def calendar(dates: Dates, step: Step) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
    """Return names and values of the calendar features that change from row to row.

    The features and their range are those of the LTSF and Informer loaders.
    """
    if step.kind == "number":
        raise ConfigError(
            "calendar needs dates, got numbered rows. Leave it out, or write dates in the column "
            "of times."
        )
    length = step.count if step.kind == "fixed" else (DAY if step.kind == "business" else 28 * DAY)
    day = dates.astype("datetime64[D]")
    seconds = _time_of_day(dates).astype(np.int64) // 10**9
    year_day = (day - dates.astype("datetime64[Y]").astype("datetime64[D]")).astype(np.int64)
    weekday = (day.astype(np.int64) + 3) % 7
    columns = {
        CALENDAR[0]: (seconds // 60 % 60 / 59, length < DAY // 24),
        CALENDAR[1]: (seconds // 3600 / 23, length < DAY),
        CALENDAR[2]: (weekday / 6, length < 7 * DAY),
        CALENDAR[3]: ((_year_month_day(dates)[2] - 1) / 30, length < 28 * DAY),
        CALENDAR[4]: (year_day / 365, True),
    }
    used = {name: values for name, (values, changes) in columns.items() if changes}
    return tuple(used), (np.stack(list(used.values()), 1) - 0.5).astype(np.float32)


def shown_date(date: Any) -> str:
    """Return a date as a message shows it."""
    if not isinstance(date, np.datetime64):
        return str(date)
    return str(date.astype("datetime64[s]")).replace("T", " ").removesuffix(" 00:00:00")
