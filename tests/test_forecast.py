import importlib.util
from itertools import pairwise

import numpy as np
import pytest

from narrowcast.cli.entry import run_command
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.forecast import Forecaster

pd = pytest.importorskip("pandas")
QUICK = {"lookback": 48, "epochs": 20, "batch_size": 64}


def wide(rows=700, noise=0.2, seed=0):
    draw, hours = np.random.default_rng(seed), np.arange(rows)
    day = 2 * np.pi * hours / 24
    return pd.DataFrame(
        {
            "ds": pd.date_range("2024-01-01", periods=rows, freq="h"),
            "a": 50 + 5 * np.sin(day) + draw.normal(0, noise, rows),
            "b": np.cos(day) + draw.normal(0, noise, rows),
        }
    )


def long_of(frame):
    return frame.melt("ds", var_name="unique_id", value_name="y")


@pytest.fixture(scope="module")
def fitted():
    return Forecaster("nlinear", horizon=12, **QUICK).fit(wide(), progress=False)


def test_a_forecast_continues_the_series(fitted):
    result, truth = fitted.predict(), wide(712, noise=0).tail(12)
    assert list(result.columns) == ["ds", "a", "b"]
    assert list(result["ds"]) == list(truth["ds"])
    assert np.abs(result["a"] - truth["a"].to_numpy()).mean() < 0.5
    assert np.abs(result["b"] - truth["b"].to_numpy()).mean() < 0.3


def test_a_long_table_gives_a_long_forecast():
    result = (
        Forecaster("nlinear", horizon=12, **QUICK).fit(long_of(wide()), progress=False).predict()
    )
    assert list(result.columns) == ["unique_id", "ds", "forecast"]
    assert list(result["unique_id"]) == ["a"] * 12 + ["b"] * 12


def test_a_forecast_of_another_table_begins_at_its_end(fitted):
    earlier = fitted.predict(wide().head(500))
    assert earlier["ds"].iloc[0] == wide()["ds"].iloc[500]


def test_saved_files_are_safetensors_and_json_and_load_to_the_same_forecast(fitted, tmp_path):
    fitted.save(tmp_path / "saved")
    names = sorted(each.name for each in (tmp_path / "saved").iterdir())
    assert names == ["forecaster.json", "history.safetensors", "model.safetensors"]
    loaded = Forecaster.load(tmp_path / "saved")
    pd.testing.assert_frame_equal(loaded.predict(), fitted.predict())
    pd.testing.assert_frame_equal(loaded.predict_intervals(), fitted.predict_intervals())
    again = loaded.fit(wide(), progress=False)
    assert again.horizon == 12


def test_the_folder_of_a_run_is_a_saved_forecaster(tmp_path):
    wide().to_csv(tmp_path / "a.csv", index=False)
    words = ["forecast/nlinear", f"data.path={tmp_path / 'a.csv'}", "horizon=12", "lookback=48"]
    run = ["train", *words, "epochs=1", "--quiet", "--out", str(tmp_path / "run")]
    assert run_command(run) == 0
    result = Forecaster.load(tmp_path / "run").predict()
    assert result["ds"].iloc[0] == wide()["ds"].iloc[-1] + pd.Timedelta("1h")


def test_a_damaged_or_missing_forecaster_raises(fitted, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no forecaster\.json"):
        Forecaster.load(tmp_path)
    fitted.save(tmp_path)
    (tmp_path / "history.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        Forecaster.load(tmp_path)


def test_one_window_of_cross_validation_is_a_forecast_of_the_shortened_table():
    table, forecaster = wide(), Forecaster("nlinear", horizon=12, **QUICK)
    result = forecaster.cross_validation(table, windows=1, progress=False)
    again = Forecaster("nlinear", horizon=12, **QUICK).fit(table.head(688), progress=False)
    first = result[result["unique_id"] == "a"]
    np.testing.assert_array_equal(first["forecast"], again.predict()["a"])
    np.testing.assert_allclose(first["y"], table["a"].tail(12), rtol=1e-6)
    assert set(first["cutoff"]) == {table["ds"].iloc[687]}


def test_origins_of_cross_validation_are_one_step_apart():
    result = Forecaster("nlinear", horizon=12, **QUICK).cross_validation(
        wide(), windows=3, step=5, progress=False
    )
    cutoffs = sorted(set(result["cutoff"]))
    assert [b - a for a, b in pairwise(cutoffs)] == 2 * [pd.Timedelta("5h")]
    assert len(result) == 3 * 2 * 12


def test_wider_levels_contain_narrower_ones(fitted):
    result = fitted.predict_intervals(levels=[50, 95])
    assert (result["lo-95"] <= result["lo-50"]).all()
    assert (result["lo-50"] <= result["forecast"]).all()
    assert (result["hi-50"] <= result["hi-95"]).all()
    with pytest.raises(ConfigError, match=r"levels must be percentages, got -0\.8"):
        fitted.predict_intervals(levels=[-0.8])


def test_columns_known_ahead_are_asked_for():
    table = wide().assign(promotion=lambda frame: (frame.index % 7 == 0).astype(float))
    settings = {**QUICK, "epochs": None, "steps": 5, "future": ["promotion"], "width": 16}
    forecaster = Forecaster("nhits", horizon=12, **settings).fit(table, progress=False)
    with pytest.raises(ConfigError, match="promotion"):
        forecaster.predict()
    ahead = pd.DataFrame(
        {"ds": pd.date_range(table["ds"].iloc[-1], periods=13, freq="h")[1:], "promotion": 0.0}
    )
    assert len(forecaster.predict(future=ahead)) == 12


def test_a_forecaster_that_is_not_fitted_raises():
    with pytest.raises(ConfigError, match="not fitted"):
        Forecaster("nlinear", horizon=12).predict()
    with pytest.raises(ConfigError, match="no such setting"):
        Forecaster("nlinear", horizon=12, widht=3)


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_polars_in_is_polars_out(fitted):
    import polars as pl

    assert isinstance(fitted.predict(pl.from_pandas(wide())), pl.DataFrame)


def test_the_command_forecasts_like_the_forecaster(fitted, tmp_path, capsys):
    fitted.save(tmp_path / "saved")
    wide().head(500).to_csv(tmp_path / "a.csv", index=False)
    saved, table = str(tmp_path / "saved"), str(tmp_path / "a.csv")
    assert run_command(["forecast", "predict", saved, table, "--level", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = fitted.predict_intervals(wide().head(500), levels=[80])
    assert lines[0].split(",") == list(result.columns)
    first = lines[1].split(",")
    assert first[:2] == ["a", str(result["ds"].iloc[0])]
    np.testing.assert_allclose([float(x) for x in first[2:]], result.iloc[0, 2:], rtol=1e-5)
    assert run_command(["forecast", "predict", saved, table, "-o", table]) == 2
    assert "must not be an input" in capsys.readouterr().err


def test_a_loaded_forecaster_knows_its_columns(tmp_path):
    table = wide().rename(columns={"ds": "hour"}).assign(promotion=0.0)
    settings = {**QUICK, "epochs": None, "steps": 5, "future": ["promotion"], "width": 16}
    settings |= {"time": "hour", "calendar": True}
    Forecaster("nhits", horizon=12, **settings).fit(table, progress=False).save(tmp_path)
    hours = pd.date_range(table["hour"].iloc[-1], periods=13, freq="h")[1:]
    ahead = pd.DataFrame({"hour": hours, "promotion": 1.0})
    result = Forecaster.load(tmp_path).predict(future=ahead)
    assert list(result.columns) == ["hour", "a", "b"]
    assert list(result["hour"]) == list(hours)
