"""The results of a run are those of scikit-learn, and the report shows them."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from narrowcast.errors import ConfigError
from narrowcast.runs import strict_json
from narrowcast.workloads.forecast import report, results
from narrowcast.workloads.forecast.data.table import SeriesTable
from narrowcast.workloads.forecast.results import Predicted, summarise

LOOKBACK, HORIZON, ROWS = 48, 24, 400


def table(*, wide, noise=0.1, gaps=False):
    """Return three series with a daily season, as one table or as three series."""
    rng = np.random.default_rng(0)
    rows = np.arange(ROWS)[:, None]
    values = 50 + 10 * np.sin(2 * np.pi * (rows / 24 + rng.random(3))) * np.array([1, 2, 3])
    values = torch.from_numpy(values + noise * rng.normal(size=values.shape)).float()
    observed = torch.ones(ROWS, 3, dtype=torch.bool)
    if gaps:
        observed[-30:-20, 1] = False
    dates = np.datetime64("2024-01-01", "ns") + np.arange(ROWS) * np.timedelta64(1, "h")
    names = ("<north>", "south", "west")
    if wide:
        return SeriesTable(
            names=names, channels=names, values=values, observed=observed, offsets=(0, ROWS),
            dates=dates, step="1h",
        )  # fmt: skip
    return SeriesTable(
        names=names, channels=("y",), values=values.T.reshape(-1, 1), step="1h",
        observed=observed.T.reshape(-1, 1), offsets=tuple(ROWS * n for n in range(4)),
        dates=np.tile(dates, 3),
    )  # fmt: skip


class Forecaster:
    """Repeats the season, and on request misses by `shift`."""

    def __init__(self, series, *, shift=0.05, quantiles=False):
        self.series, self.shift, self.quantiles = series, shift, quantiles
        bounds = list(zip(series.offsets, series.offsets[1:], strict=False))
        self.centre = torch.stack([series.values[a:b].mean(0) for a, b in bounds])
        self.spread = torch.stack([series.values[a:b].std(0) for a, b in bounds])
        ends = torch.tensor(series.offsets[1:])
        last = [np.arange(b - 100, b - LOOKBACK - HORIZON + 1) for _, b in bounds]
        self.starts = torch.from_numpy(np.concatenate(last))
        self.train = [(a, b - 100) for a, b in bounds]
        self.ends = ends

    def __call__(self, starts, levels):
        rows = starts[:, None] + torch.arange(LOOKBACK + HORIZON)
        which = torch.searchsorted(self.ends, starts, right=True)
        scaled = (self.series.values[rows] - self.centre[which, None]) / self.spread[which, None]
        scaled = scaled.mT
        x, y = scaled[..., :LOOKBACK], scaled[..., LOOKBACK:]
        point = x[..., -24:] + self.shift
        bands = tuple(
            torch.stack([point - 0.1, point + 0.1], -1) if self.quantiles else None for _ in levels
        )
        observed = self.series.observed[rows].mT[..., LOOKBACK:]
        return Predicted(x, y, observed, point, bands)

    def summarised(self, **more):
        return summarise(
            self, self.starts, table=self.series, centre=self.centre, spread=self.spread,
            train=self.train, **more,
        )  # fmt: skip


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("gaps", [True, False])
def test_errors_are_those_of_sklearn(wide, gaps):
    forecaster = Forecaster(table(wide=wide, gaps=gaps))
    found = forecaster.summarised(batch_size=7)
    windows = forecaster(forecaster.starts, ())
    there = windows.observed.numpy()
    actual, point = windows.y.numpy()[there], windows.point.numpy()[there]
    assert found.model.mae == pytest.approx(
        sklearn_metrics.mean_absolute_error(actual, point), rel=1e-5
    )
    assert found.model.rmse == pytest.approx(
        sklearn_metrics.root_mean_squared_error(actual, point), rel=1e-5
    )
    last = np.broadcast_to(windows.x.numpy()[..., -1:], windows.y.shape)
    repeat = next(each for each in found.methods if each.name == "repeat")
    assert repeat.mse == pytest.approx(np.mean((actual - last[there]) ** 2), rel=1e-5)
    step = (windows.y - windows.point).abs().numpy()
    np.testing.assert_allclose(
        found.model.by_step, [step[..., h][there[..., h]].mean() for h in range(HORIZON)], rtol=1e-5
    )
    assert [each.name for each in found.methods] == ["model", "repeat", "seasonal naive", "drift"]
    assert found.best_baseline == "seasonal naive"
    assert found.windows == len(forecaster.starts)
    assert sum(found.residual_counts) == there.sum()


def test_mase_and_smape_are_in_the_units_of_the_series():
    forecaster = Forecaster(table(wide=True))
    found = forecaster.summarised()
    windows = forecaster(forecaster.starts, ())
    values = forecaster.series.values.double().numpy()
    scale = np.abs(values[24:300] - values[:276]).mean(0)
    centre, spread = forecaster.centre.numpy().T, forecaster.spread.numpy().T
    actual, point = (each.numpy() * spread + centre for each in (windows.y, windows.point))
    mase = np.abs(actual - point).mean((0, 2)) / scale
    by_name = {each.name: each.mase for each in found.series}
    expected = dict(zip(("<north>", "south", "west"), mase, strict=True))
    assert by_name == pytest.approx(expected, rel=1e-4)
    assert found.model.mase == pytest.approx(mase.mean(), rel=1e-4)
    smape = 200 * np.mean(np.abs(actual - point) / (np.abs(actual) + np.abs(point)))
    assert found.model.smape == pytest.approx(smape, rel=1e-4)
    assert [each.kind for each in found.drawn] == ["best", "median", "worst"]
    best = found.drawn[0]
    channel = forecaster.series.names.index(best.name)
    np.testing.assert_allclose(best.actual, values[-24:, channel], rtol=1e-4)
    np.testing.assert_allclose(best.before, values[-72:-24, channel], rtol=1e-4)
    assert (best.start, best.end) == ("2024-01-16 16:00:00", "2024-01-17 15:00:00")


def test_coverage_is_that_of_the_intervals():
    exact = Forecaster(table(wide=True, noise=0.0), shift=0.05, quantiles=True)
    found = exact.summarised()
    assert [(each.level, each.measured) for each in found.coverage] == [(0.8, 1.0), (0.95, 1.0)]
    assert found.interval_source == "distribution"
    missing = Forecaster(table(wide=True, noise=0.0), shift=0.2, quantiles=True).summarised()
    assert missing.coverage[0].measured == 0
    residuals = torch.full((30, 3, HORIZON), 0.1)
    conformal = Forecaster(table(wide=True, noise=0.0)).summarised(residuals=residuals)
    assert conformal.interval_source == "conformal"
    assert [each.measured for each in conformal.coverage] == [1.0, 1.0]
    assert conformal.coverage[0].width == pytest.approx(0.2)
    assert len(conformal.drawn[0].lower) == 2
    few = Forecaster(table(wide=True)).summarised(residuals=residuals[:10])
    assert [each.level for each in few.coverage] == [0.8]
    assert Forecaster(table(wide=True)).summarised().coverage == ()


def test_no_windows_raise():
    forecaster = Forecaster(table(wide=True))
    forecaster.starts = forecaster.starts[:0]
    with pytest.raises(ConfigError, match="no test windows to measure"):
        forecaster.summarised()


def test_file_is_what_was_written(tmp_path):
    found = Forecaster(table(wide=True, gaps=True)).summarised()
    results.write(tmp_path, found)
    assert results.read(tmp_path) == found


@pytest.mark.parametrize("wide", [True, False])
def test_report_says_whether_the_model_beats_the_baseline(tmp_path, wide):
    good = Forecaster(table(wide=wide), shift=0.0).summarised(residuals=torch.ones(30, 1, HORIZON))
    assert "does not beat the baseline seasonal naive" in report.verdict(good)
    better = good.model_copy(
        update={"methods": (good.methods[0].model_copy(update={"mae": 0.0}), *good.methods[1:])}
    )
    assert "beats the best baseline, seasonal naive: MAE 0 against" in report.verdict(better)
    results.write(tmp_path, good)
    sections = report.sections(tmp_path, [])
    assert [each.title for each in sections] == [
        "Forecast accuracy", "Forecasts", "Error by step", "Intervals", "Residuals", "Series",
    ]  # fmt: skip
    html = "".join(each.html for each in sections)
    assert "&lt;north&gt;" in html
    assert "does not beat" in html


def test_damaged_or_missing_results_do_not_stop_a_report(tmp_path):
    assert report.sections(tmp_path, []) == []
    (tmp_path / results.FILE).write_text("{}")
    assert "cannot be read" in report.sections(tmp_path, [])[0].html
    found = Forecaster(table(wide=True)).summarised().model_dump(mode="json")
    (tmp_path / results.FILE).write_text(strict_json.dumps(found | {"horizon": "<b>"}))
    assert "cannot be read" in report.sections(tmp_path, [])[0].html


def test_forecasts_that_are_not_finite_are_no_success(tmp_path):
    forecaster = Forecaster(table(wide=True), shift=float("nan"))
    summary = forecaster.summarised(residuals=torch.full((30, 3, HORIZON), torch.nan))
    assert summary.model.mae is None
    results.write(tmp_path, summary)
    accuracy = report.sections(tmp_path, [])[0].html
    assert '<li class="bad">The errors are not finite' in accuracy


def test_horizon_of_one_and_one_series_have_a_report(tmp_path):
    forecaster = Forecaster(table(wide=True))
    series = forecaster.series
    one = SeriesTable(
        names=("a",), channels=("a",), values=series.values[:, :1], observed=series.observed[:, :1],
        offsets=(0, ROWS), dates=np.arange(ROWS), step="1",
    )  # fmt: skip

    def predict(starts, levels):
        rows = starts[:, None] + torch.arange(5)
        window = one.values[rows].mT
        return Predicted(window[..., :4], window[..., 4:], None, window[..., 3:4])

    found = summarise(
        predict, torch.arange(300, 390), table=one, centre=torch.zeros(1, 1),
        spread=torch.ones(1, 1), train=[(0, 300)],
    )  # fmt: skip
    results.write(tmp_path, found)
    assert [each.name for each in found.methods] == ["model", "repeat", "drift"]
    titles = [each.title for each in report.sections(tmp_path, [])]
    assert titles == ["Forecast accuracy", "Forecasts", "Residuals"]
