"""Tables are read as pandas reads them, whatever file or frame they come in."""

import gzip
import io
import zipfile

import numpy as np
import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.forecast.data.table import Layout, future_dates, read_future, read_table

pandas = pytest.importorskip("pandas")


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    dates = pandas.date_range("2023-12-30", periods=100, freq="15min")
    return pandas.DataFrame({"date": dates, "a": rng.normal(size=100), "b": rng.normal(size=100)})


def same(table, frame):
    """Return whether a table has the values and dates of a wide frame."""
    values = torch.tensor(frame[["a", "b"]].to_numpy(), dtype=torch.float32)
    dates = frame["date"].to_numpy().astype("datetime64[ns]")
    return torch.equal(table.values, values) and (table.dates == dates).all()


def test_wide_csv_is_one_aligned_series(tmp_path, frame):
    file = tmp_path / "wide.csv"
    frame.to_csv(file, index=False)
    table = read_table(file)
    assert same(table, frame)
    assert table.names == table.channels == ("a", "b")
    assert table.offsets == (0, 100)
    assert table.step == "15min"
    assert table.notes == ()
    assert table.observed.all()


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: ("\n\n" + text + "\n\n").encode(),
        lambda text: text.replace("\n", "\n\n").encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: text.replace(",", "\t").encode(),
        lambda text: text.replace(",", ";").encode(),
        lambda text: "\n".join(
            ",".join(f'"{cell}"' for cell in line.split(",")) for line in text.split()
        ).encode(),
        lambda text: text.replace(",", " , ").encode(),
    ],
    ids=["bom", "utf-16", "crlf", "blank ends", "blank lines", "gzip", "tab", "semicolon",
         "quoted", "spaces"],
)  # fmt: skip
def test_csv_is_read_however_it_is_written(tmp_path, frame, encode):
    file = tmp_path / "wide.csv"
    file.write_bytes(encode(frame.to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S")))
    assert same(read_table(file), frame)


def test_decimal_commas_are_read_on_request(tmp_path, frame):
    file = tmp_path / "wide.csv"
    frame.to_csv(file, index=False, sep=";", decimal=",")
    assert same(read_table(file, Layout(decimal=",")), frame)


def test_zip_with_one_table_and_a_named_member(tmp_path, frame):
    text = frame.to_csv(index=False)
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("folder/wide.csv", text)
    assert same(read_table(tmp_path / "one.zip"), frame)
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("folder/wide.csv", text)
        archive.writestr("folder/other.csv", "date,a\n")
    assert same(read_table(tmp_path / "two.zip" / "folder" / "wide.csv"), frame)
    assert same(read_table(tmp_path / "two.zip" / "wide.csv"), frame)
    with pytest.raises(ConfigError, match=r"two.zip must have one table, got folder/wide.csv, fol"):
        read_table(tmp_path / "two.zip")


def test_parquet_and_frames_are_the_csv(tmp_path, frame):
    pyarrow = pytest.importorskip("pyarrow")
    frame.to_parquet(tmp_path / "wide.parquet", index=False)
    assert same(read_table(tmp_path / "wide.parquet"), frame)
    assert same(read_table(frame), frame)
    assert same(read_table(frame.set_index("date")), frame)
    assert same(read_table(frame.set_index("date").rename_axis(None)), frame)
    assert same(read_table(pyarrow.Table.from_pandas(frame)), frame)


def test_polars_frame_is_the_csv(frame):
    polars = pytest.importorskip("polars")
    columns = {name: frame[name].to_numpy() for name in frame}
    assert same(read_table(polars.DataFrame(columns)), frame)
    zoned = polars.DataFrame(columns).with_columns(
        polars.col("date").dt.replace_time_zone("Europe/Berlin")
    )
    utc = frame.assign(date=frame["date"] - pandas.Timedelta("1h"))
    assert same(read_table(zoned), utc)
    days = zoned.with_columns(
        polars.datetime_range(polars.datetime(2024, 3, 1), polars.datetime(2024, 6, 8), "1d")
        .dt.replace_time_zone("Europe/Berlin")
        .alias("date")
    )
    assert read_table(days).step == "1D"
    with pytest.raises(ConfigError, match=r"Write frame.collect\(\)"):
        read_table(polars.LazyFrame(columns))


def test_index_column_that_pandas_writes_is_left_out(tmp_path, frame):
    file = tmp_path / "wide.csv"
    frame.to_csv(file)
    table = read_table(file)
    assert table.channels == ("a", "b")
    assert table.notes[0].startswith("columns not used: column 1")


def test_times_with_zones_become_utc(tmp_path, frame):
    zoned = frame.assign(date=frame["date"].dt.tz_localize("Europe/Berlin"))
    utc = frame.assign(date=zoned["date"].dt.tz_convert("UTC").dt.tz_localize(None))
    assert same(read_table(zoned), utc)
    file = tmp_path / "zoned.csv"
    zoned.to_csv(file, index=False)
    assert same(read_table(file), utc)


def test_midnights_of_a_zone_are_dates(tmp_path):
    dates = pandas.date_range("2024-03-20", periods=30, freq="D")  # with a change of clocks
    frame = pandas.DataFrame({"date": dates, "a": 1.0 * np.arange(30), "b": 0.0})
    zoned = frame.assign(date=dates.tz_localize("Europe/Berlin"))
    assert same(read_table(zoned), frame)
    zoned.to_csv(tmp_path / "zoned.csv", index=False)
    assert same(read_table(tmp_path / "zoned.csv"), frame)


def test_long_table_has_series_in_order_of_the_file():
    frame = pandas.DataFrame(
        {
            "unique_id": ["b", "b", "a", "a", "a"],
            "ds": pandas.to_datetime(
                ["2024-01-02", "2024-01-01", "2024-01-01", "2024-01-02", "2024-01-03"]
            ),
            "y": [2.0, 1.0, 3.0, 4.0, 5.0],
            "promo": [0, 1, 0, 1, 0],
            "region": ["south", "south", "north", "north", "north"],
            "size": [5, 5, 7, 7, 7],
        }
    )
    layout = Layout(past=["promo"], static=["region", "size"])
    table = read_table(frame, layout)
    assert table.names == ("b", "a")
    assert table.channels == ("y",)
    assert table.offsets == (0, 2, 5)
    assert table.values.flatten().tolist() == [1, 2, 3, 4, 5]
    assert table.past.flatten().tolist() == [1, 0, 0, 1, 0]
    assert table.static_names == ("region=north", "region=south", "size")
    assert table.static.tolist() == [[0, 1, 5], [1, 0, 7]]
    assert table.notes == ("rows that were not in order of dates and are sorted: 1",)
    ends = [str(date)[:10] for date in future_dates(table, 2).flatten()]
    assert ends == ["2024-01-03", "2024-01-04", "2024-01-04", "2024-01-05"]


@pytest.mark.parametrize("fill", ["forward", "interpolate", "zero"])
def test_missing_rows_and_values_are_filled_as_pandas_does(frame, fill):
    holes = frame.copy()
    holes.loc[[10, 11, 40], "a"] = np.nan
    holes = holes.drop(index=[60, 61, 62])
    table = read_table(holes, Layout(fill=fill))
    expected = holes.set_index("date").reindex(frame["date"])
    match fill:
        case "forward":
            expected = expected.ffill()
        case "zero":
            expected = expected.fillna(0.0)
        case _:
            expected = expected.interpolate(method="linear")
    np.testing.assert_allclose(table.values.numpy(), expected.to_numpy(), rtol=1e-6)
    assert (~table.observed).sum(0).tolist() == [6, 3]
    assert table.notes == (f"missing values filled ({fill}): 9, in columns a, b",)


@pytest.mark.parametrize("freq", ["90s", "6h", "2D", "W-WED", "B", "MS", "ME", "QE", "YS"])
def test_shuffled_series_with_gaps_are_reindexed_as_pandas_does(tmp_path, freq):
    rng, expected, parts = np.random.default_rng(0), {}, []
    for name in ("c", "a", "b"):
        start = pandas.Timestamp("2001-01-03") + pandas.Timedelta(days=int(rng.integers(3000)))
        index = pandas.date_range(start, periods=int(rng.integers(12, 60)), freq=freq, name="ds")
        values = pandas.Series(rng.normal(size=len(index)), index=index, name="y")
        holes = values.drop(rng.choice(index[1:-1], size=3, replace=False))
        parts.append(holes.reset_index().assign(unique_id=name))
        expected[name] = holes.reindex(index).interpolate()
    file = tmp_path / "long.csv"
    pandas.concat(parts).sample(frac=1, random_state=0).to_csv(file, index=False)
    table = read_table(file, Layout(fill="interpolate"))
    for index, name in enumerate(table.names):
        rows = slice(*table.offsets[index : index + 2])
        assert (table.dates[rows] == expected[name].index.to_numpy()).all()
        np.testing.assert_allclose(table.values[rows, 0], expected[name], rtol=1e-6, atol=1e-7)
    assert (~table.observed).sum() == 9


@pytest.mark.parametrize(
    ("freq", "step"),
    [("7min", "7min"), ("h", "1h"), ("D", "1D"), ("W", "1W"), ("MS", "1MS"), ("ME", "1ME"),
     ("QS", "3MS"), ("QE", "3ME"), ("YS", "12MS"), ("YE", "12ME"), ("B", "1B"), ("36h", "36h")],
)  # fmt: skip
def test_frequency_is_that_of_pandas_and_goes_on_as_pandas_does(freq, step):
    dates = pandas.date_range("2023-11-17", periods=60, freq=freq)
    table = read_table(pandas.DataFrame({"date": dates[:40], "a": np.arange(40.0)}))
    assert table.step == step
    assert (table.dates == dates[:40].to_numpy()).all()
    assert (future_dates(table, 20)[0] == dates[40:].to_numpy()).all()


@pytest.mark.parametrize(
    ("written", "date_format"),
    [("%Y/%m/%d %H:%M", None), ("%Y%m%d", None), ("%d.%m.%Y", None), ("%d/%m/%Y", None),
     ("%m/%d/%Y %I:%M %p", None), ("%Y-%m-%dT%H:%M:%S.%f", None), ("%Y-%m-%d %H:%M:%SZ", None),
     ("%d %b %Y", "%d %b %Y")],
)  # fmt: skip
def test_dates_are_read_as_strptime_reads_them(tmp_path, written, date_format):
    dates = pandas.date_range("2024-02-20", periods=30, freq="D")
    file = tmp_path / "wide.csv"
    rows = [f"{date.strftime(written)},{row}" for row, date in enumerate(dates)]
    file.write_text("\n".join(["date,a", *rows]))
    table = read_table(file, Layout(date_format=date_format))
    assert (table.dates == dates.to_numpy()).all()


def test_dates_without_leading_zeros_are_read(tmp_path):
    file = tmp_path / "exchange.csv"  # as the exchange-rate file of the LTSF benchmark
    file.write_text("date,0\n1990/1/1 0:00,1\n1990/1/2 0:00,2\n1990/1/3 0:00,3\n")
    table = read_table(file)
    assert str(table.dates[-1])[:19] == "1990-01-03T00:00:00"
    assert table.channels == ("0",)


def test_rows_may_be_numbered():
    frame = pandas.DataFrame({"unique_id": ["a"] * 5, "ds": range(3, 8), "y": range(5)})
    table = read_table(frame)
    assert table.step == "1"
    assert future_dates(table, 2).tolist() == [[8, 9]]


def test_constant_series_is_noted():
    frame = pandas.DataFrame(
        {"date": pandas.date_range("2024", periods=9), "a": 1.0, "b": range(9)}
    )
    assert read_table(frame).notes == (
        "series that never change, so that their MASE is undefined: 1 (a)",
    )


def test_calendar_is_known_ahead(frame):
    table = read_table(frame, Layout(calendar=True))
    index = pandas.DatetimeIndex(frame["date"])
    expected = np.stack(
        [index.minute / 59, index.hour / 23, index.day_of_week / 6, (index.day - 1) / 30,
         (index.day_of_year - 1) / 365], 1
    )  # fmt: skip
    np.testing.assert_allclose(table.future.numpy(), expected - 0.5, atol=1e-6)
    ahead = read_future(None, table, horizon=3)
    later = read_table(
        pandas.DataFrame(
            {"date": pandas.date_range(frame["date"].iloc[-1], periods=4, freq="15min"), "a": 0.0}
        ),
        Layout(calendar=True),
    )
    assert torch.equal(ahead[0], later.future[1:])


def test_nullable_and_categorical_columns_are_read():
    frame = pandas.DataFrame(
        {
            "unique_id": pandas.Categorical(["a", "a", "b", "b"]),
            "ds": pandas.period_range("2024-01", periods=2, freq="M").tolist() * 2,
            "y": pandas.array([1, None, 3, 4], dtype="Int64"),
        }
    )
    frame["ds"] = frame["ds"].astype("period[M]")
    table = read_table(frame, Layout(fill="forward"))
    assert table.values.flatten().tolist() == [1, 1, 3, 4]
    assert table.step == "1MS"


def test_text_buffer_of_csv_writer_with_line_breaks_in_quotes(tmp_path):
    file = tmp_path / "long.csv"
    buffer = io.StringIO()
    pandas.DataFrame(
        {
            "unique_id": ["a\nb"] * 3,
            "ds": ["2024-01-01", "2024-01-02", "2024-01-03"],
            "y": [1, 2, 3],
        }
    ).to_csv(buffer, index=False)
    file.write_text(buffer.getvalue() + '"a\nb",2024-01-04,x\n')
    with pytest.raises(ConfigError, match=r"line 8: column 'y' must have numbers, got 'x'"):
        read_table(file)
