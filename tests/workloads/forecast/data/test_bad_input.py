"""Bad tables raise an error that names the file, the series and the row."""

import re

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.forecast.data.split import split
from narrowcast.workloads.forecast.data.table import Layout, read_future, read_table

HOURS = [f"2024-01-01 {hour:02}:00:00" for hour in range(24)]


def wide(cells=None, hours=HOURS, header="date,a,b"):
    """Return a table of two columns in which some rows are replaced."""
    rows = [f"{date},{row},{row * 2}" for row, date in enumerate(hours)]
    for row, text in (cells or {}).items():
        rows[row] = text
    return "\n".join([header, *rows]) + "\n"


def long(cells=None):
    """Return two series of six days in which some rows are replaced."""
    rows = [f"{name},2024-01-0{day},{day}" for name in ("north", "south") for day in range(1, 7)]
    for row, text in (cells or {}).items():
        rows[row] = text
    return "\n".join(["unique_id,ds,y", *rows]) + "\n"


CASES = {
    "empty file": ("", {}, "bad.csv is empty"),
    "header only": ("date,a\n", {}, "bad.csv has a header but no rows"),
    "no header": (wide(header=f"{HOURS[0]},1,2"), {}, "line 1 must be a header"),
    "duplicate column names": (wide(header="date,a,a"), {}, "several columns 'a'"),
    "no column of dates": (wide(header="when ever,a,b", hours="x" * 24), {}, "no column of dates"),
    "wrong column": (wide(), {"target": ["bb"]}, "no column 'bb', which target names.*mean 'b'"),
    "past column named as target": (
        wide(), {"target": ["a"], "past": ["a"]}, "column 'a' must have one role, got target and pa"
    ),
    "no target": (long().replace(",y", ",value"), {}, "no column 'y' to forecast, got value"),
    "one column": ("date\n2024-01-01\n", {}, "header must have a column of dates and one of val"),
    "wrong delimiter": (wide(), {"delimiter": ";"}, "header has no ';'.*delimiter=','"),
    "too few cells": (wide({3: f"{HOURS[3]},1"}), {}, "line 5 must have 3 columns.*got 2"),
    "decimal commas between commas": (
        wide({3: f"{HOURS[3]},1,5,2,5"}), {}, "line 5 must have 3 columns.*decimal comma"
    ),
    "decimal commas between semicolons": (
        wide({3: f"{HOURS[3]},1.5;2"}).replace(",", ";").replace("1.5", "1,5"), {},
        "line 5: column 'a' must have numbers, got '1,5'.*decimal=','",
    ),
    "decimal points instead of commas": (
        wide({3: f"{HOURS[3]},1.5,2"}), {"decimal": ","}, "line 5: .*got '1.5'. Write decimal='.'"
    ),
    "not numeric": (wide({3: f"{HOURS[3]},three,2"}), {}, "line 5: column 'a' must have numbers"),
    "thousands with underscores": (wide({3: f"{HOURS[3]},1_0,2"}), {}, "line 5: .*got '1_0'"),
    "infinite": (wide({3: f"{HOURS[3]},inf,2"}), {}, "line 5: column 'a' must be finite"),
    "beyond float32": (wide({3: f"{HOURS[3]},1e39,2"}), {}, "line 5: .*below 3.4e38, got 1e\\+39"),
    "missing value": (
        wide({3: f"{HOURS[3]},,2"}), {}, "line 5 has no value in column 'a' .missing.*fill="
    ),
    "missing row": (
        wide(hours=HOURS[:3] + HOURS[5:]), {}, "line 4: the row after 2024-01-01 02:00:00 is missi"
    ),
    "nothing before to carry forward": (
        wide({0: f"{HOURS[0]},,2"}), {"fill": "forward"}, "line 2 has no value in column 'a', and n"
    ),
    "column without a value": (
        wide(dict(enumerate(f"{date},,2" for date in HOURS))), {"fill": "zero"}, "no value in colu"
    ),
    "irregular frequency": (
        wide({3: "2024-01-01 03:07:00,3,6"}), {},
        "line 5: rows must be 1h apart as most are, got 2024-01-01 03:07:00 after 2024-01-01 02:0",
    ),
    "finer than the step": (wide(), {"step": "1D"}, "line 3: rows must be 1D apart"),
    "date far away": (
        wide({23: "2224-01-01 00:00:00,3,6"}), {"fill": "zero"}, "line 25: .*leaves out 1,753,129"
    ),
    "duplicate date in a wide table": (
        wide({3: f"{HOURS[2]},3,6"}), {}, "line 5 has the date 2024-01-01 02:00:00 of line 4.*id"
    ),
    "duplicate date in a series": (
        long({8: "south,2024-01-02,3"}), {}, "line 10, series 'south' has the date 2024-01-02 of"
    ),
    "missing date": (wide({3: ",3,6"}), {}, "line 5 has no date in column 'date'"),
    "no such date": (wide({3: "2024-02-30 00:00:00,3,6"}), {}, "line 5: .*dates of the calendar"),
    "mixed date formats": (
        wide({3: "01.01.2024 03:00,3,6"}), {}, "line 5: .*in one format as '2024-01-01 00:00:00' in"
    ),
    "day or month first": (
        "date,a\n01/02/2024,1\n02/02/2024,2\n", {}, "may have the day or the month first, got '01"
    ),
    "day first and month first": (
        "date,a\n13/02/2024,1\n02/14/2024,2\n", {}, "day first in .*line 2 and the month first in "
    ),
    "other than date_format": (
        wide(), {"date_format": "%d.%m.%Y"}, "line 2: .*does not match date_format='%d.%m.%Y'"
    ),
    "time zone in some rows": (
        wide({3: f"{HOURS[3]}+02:00,3,6"}), {}, "time zone in all rows or in none, got one in"
    ),
    "series without a name": (long({8: ",2024-01-03,3"}), {}, "line 10 has no series in col"),
    "series named nan": (long({8: "nan,2024-01-03,3"}), {}, "line 10 has no series"),
    "missing value in a series": (
        long({8: "south,2024-01-03,"}), {}, "line 10, series 'south' has no value in column 'y'"
    ),
    "missing row in a series": (
        long({8: "west,2024-01-03,1"}), {}, "line 9, series 'south': the row after 2024-01-02 is"
    ),
    "static column that changes": (
        long().replace("unique_id,ds,y", "unique_id,ds,static").replace("static", "y"),
        {"static": ["y"], "target": ["y"]}, "must have one role",
    ),
    "single rows": ("unique_id,ds,y\na,2024-01-01,1\nb,2024-01-01,1\n", {}, "at least two rows"),
    "open quote": (wide({3: f'{HOURS[3]},"3,6'}), {}, "line 5: unexpected end of data"),
    "wrong step": (wide(), {"step": "1 fortnight"}, "step must be a frequency"),
    "text instead of a list": (wide(), {"target": "a"}, r"target must be a list.*Write \['a'\]"),
    "wrong fill": (wide(), {"fill": "mean"}, "fill must be raise, forward, interpolate or zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_table_raises(tmp_path, name):
    text, layout, message = CASES[name]
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table(file, Layout(**layout))


FILES = {
    "latin-1": (
        "date,größe\n2024-01-01,1\n".encode("latin-1"),
        "line 1 is not UTF-8, got byte 0xf6",
    ),
    "json": (b'[{"ds": 1}]', "must be a CSV or parquet file, got a JSON file"),
    "binary": (b"date,a\n\0\0\n", "must be text, got zero bytes"),
    "damaged gzip": (b"\x1f\x8b\x08\x00nonsense", "bad is damaged"),
    "damaged zip": (b"PK\x03\x04nonsense", "bad is damaged"),
    "damaged parquet": (b"PAR1nonsense", "bad is a damaged parquet file"),
    "xz": (b"\xfd7zXZ\0", "got an xz archive"),
}


@pytest.mark.parametrize("name", FILES)
def test_file_of_another_format_raises(tmp_path, name):
    content, message = FILES[name]
    file = tmp_path / "bad"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_table(file)


def test_missing_file_and_folder_raise(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.csv cannot be read: No such file"):
        read_table(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match="cannot be read: it is a folder"):
        read_table(tmp_path)
    with pytest.raises(ConfigError, match="got a dict"):
        read_table({"ds": [1, 2]})


def test_changing_static_column_names_its_row(tmp_path):
    file = tmp_path / "long.csv"
    rows = "".join(f"a,2024-01-0{day},1,{day > 3}\n" for day in range(1, 7))
    file.write_text(f"unique_id,ds,y,size\n{rows}")
    with pytest.raises(
        ConfigError, match=r"line 5, series 'a': static column 'size' must have one"
    ):
        read_table(file, Layout(static=["size"]))


def test_short_series_raises_or_is_left_out(tmp_path):
    file = tmp_path / "long.csv"
    rows = [f"{name},{day},{day}" for name, days in (("a", 40), ("b", 9)) for day in range(days)]
    file.write_text("\n".join(["unique_id,ds,y", *rows]))
    table = read_table(file)
    with pytest.raises(
        ConfigError, match=r"long.csv, series 'b' has 9 rows.*lookback=6 and horizon"
    ):
        split(table, lookback=6, horizon=3)
    parts = split(table, lookback=6, horizon=3, short="drop")
    assert parts.train == ((0, 28), (40, 40))
    assert parts.notes == ("series left out because they are too short: 1",)
    with pytest.raises(ConfigError, match="all 2 series are too short"):
        split(table, lookback=60, horizon=3, short="drop")


def test_future_columns_that_end_too_early_raise(tmp_path):
    known, ahead = tmp_path / "known.csv", tmp_path / "ahead.csv"
    known.write_text(
        "unique_id,ds,y,price\n" + "".join(f"a,2024-01-0{day},1,{day}\n" for day in range(1, 7))
    )
    ahead.write_text("unique_id,ds,price\na,2024-01-07,7\na,2024-01-08,8\n")
    table = read_table(known, Layout(future=["price"]))
    assert read_future(ahead, table, horizon=2).flatten().tolist() == [7, 8]
    message = r"ahead.csv, series 'a' has no row for 2024-01-09, the last is 2024-01-08.*until 2024"
    with pytest.raises(ConfigError, match=message):
        read_future(ahead, table, horizon=4)
    ahead.write_text("unique_id,ds,price\na,2024-01-07,7\na,2024-01-08,\n")
    with pytest.raises(ConfigError, match=r"line 3 has no value in column 'price'"):
        read_future(ahead, table, horizon=2)
    ahead.write_text("unique_id,ds,price\nb,2024-01-07,7\n")
    with pytest.raises(ConfigError, match=r"ahead.csv has no rows of series 'a'"):
        read_future(ahead, table, horizon=2)
    with pytest.raises(ConfigError, match="needs a table of their future values"):
        read_future(None, table, horizon=2)


def test_every_message_names_the_file_once(tmp_path):
    for name, (text, layout, _) in CASES.items():
        file = tmp_path / "bad.csv"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_table(file, Layout(**layout))
        message = str(caught.value)
        settings = name in ("wrong step", "text instead of a list", "wrong fill")
        assert settings or "bad.csv" in message, message
        assert re.search(r"[.?]$", message), message
