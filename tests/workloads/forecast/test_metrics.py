"""Metrics and baselines equal scikit-learn, exact arithmetic and published numbers."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from sklearn.preprocessing import StandardScaler

from narrowcast.errors import ConfigError
from narrowcast.workloads.forecast import baselines, metrics
from narrowcast.workloads.forecast.data.split import ltsf_split
from narrowcast.workloads.forecast.data.table import read_table
from narrowcast.workloads.forecast.scaling import Scaling

ETT = Path(__file__).parents[3] / "../shared/data/timeseries/ETT-small.zip"


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    forecast, actual = torch.randn(2, 40, 6, 3, generator=generator)
    return forecast, actual


def test_errors_are_those_of_sklearn(pairs):
    forecast, actual = pairs
    flat = actual.flatten().numpy(), forecast.flatten().numpy()
    assert metrics.mae(*pairs).item() == pytest.approx(sklearn_metrics.mean_absolute_error(*flat))
    assert metrics.mse(*pairs).item() == pytest.approx(sklearn_metrics.mean_squared_error(*flat))
    root = sklearn_metrics.root_mean_squared_error(*flat)
    assert metrics.rmse(*pairs).item() == pytest.approx(root)
    by_step = metrics.mae(*pairs, dims=(0, 2))
    expected = [
        sklearn_metrics.mean_absolute_error(actual[:, h].flatten(), forecast[:, h].flatten())
        for h in range(6)
    ]
    assert by_step.tolist() == pytest.approx(expected)


def test_quantile_loss_is_the_pinball_loss_of_sklearn(pairs):
    forecast, actual = pairs
    levels = (0.1, 0.5, 0.9)
    quantiles = torch.stack([forecast - 1, forecast, forecast + 1], -1)
    expected = np.mean(
        [
            sklearn_metrics.mean_pinball_loss(
                actual.flatten(), quantiles[..., k].flatten(), alpha=level
            )
            for k, level in enumerate(levels)
        ]
    )
    assert metrics.quantile_loss(quantiles, levels, actual).item() == pytest.approx(expected)
    assert metrics.crps_from_quantiles(quantiles, levels, actual).item() == pytest.approx(
        2 * expected
    )


def test_crps_of_many_normal_quantiles_is_the_closed_form():
    normal, count = torch.distributions.Normal(0.0, 1.0), 1000
    levels = [(k + 0.5) / count for k in range(count)]
    actual = torch.tensor([-1.5, 0.0, 0.7], dtype=torch.float64)
    quantiles = normal.icdf(torch.tensor(levels, dtype=torch.float64)).expand(3, -1)
    # Gneiting and Raftery 2007, equation 21.
    closed = actual * (2 * normal.cdf(actual) - 1)
    closed = closed + 2 * normal.log_prob(actual).exp() - 1 / torch.pi**0.5
    result = metrics.crps_from_quantiles(quantiles, levels, actual, dims=())
    torch.testing.assert_close(result, closed, atol=2e-3, rtol=0)


def test_smape_and_mase_are_exact():
    forecast, actual = torch.tensor([110.0, 0.0, 3.0]), torch.tensor([90.0, 0.0, -1.0])
    # 20/200, 0/0 and 4/4, times 200.
    assert metrics.smape(forecast, actual).item() == pytest.approx(200 * (0.1 + 0 + 1) / 3)
    rows = torch.tensor([[1.0, 5.0], [3.0, 5.0], [2.0, 5.0], [7.0, 5.0]])
    assert metrics.mase_scale(rows).tolist() == pytest.approx([8 / 3, 0])
    assert metrics.mase_scale(rows, season=2).tolist() == [2.5, 0]
    errors = torch.tensor([[4.0, 1.0]])
    scale = metrics.mase_scale(rows, season=2)
    assert metrics.mase(errors, torch.zeros(1, 2), scale).item() == pytest.approx(1.6)
    with pytest.raises(ConfigError, match="season=4, got 4"):
        metrics.mase_scale(rows, season=4)


def test_missing_values_do_not_count():
    actual = torch.tensor([1.0, torch.nan, 3.0])
    forecast = torch.tensor([2.0, 9.0, 5.0])
    assert metrics.mae(forecast, actual).item() == 1.5
    assert metrics.smape(forecast, actual).item() == pytest.approx(200 * (1 / 3 + 2 / 8) / 2)
    assert metrics.coverage(forecast - 1, forecast + 1, actual).item() == 0.5


def test_shapes_that_would_broadcast_raise():
    with pytest.raises(ConfigError, match=r"one shape, got \(3, 1\) and \(3,\)"):
        metrics.mae(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ConfigError, match=r"the shape \(3, 2\), got \(3,\)"):
        metrics.quantile_loss(torch.zeros(3), (0.1, 0.9), torch.zeros(3))
    with pytest.raises(ConfigError, match="levels must be between 0 and 1"):
        metrics.quantile_loss(torch.zeros(3, 1), (90,), torch.zeros(3))


def test_baselines_are_exact():
    windows = torch.tensor([1.0, 2.0, 4.0, 7.0])[None, :, None]
    assert baselines.repeat(windows, 3).flatten().tolist() == [7, 7, 7]
    assert baselines.seasonal_naive(windows, 5, 2).flatten().tolist() == [4, 7, 4, 7, 4]
    assert baselines.drift(windows, 2).flatten().tolist() == [9, 11]
    assert list(baselines.baselines(24, 4)) == ["repeat", "drift"]
    with pytest.raises(ConfigError, match="season must be between 1 and the lookback of 4"):
        baselines.seasonal_naive(windows, 3, 5)


# "Repeat" of table 2 in Zeng et al. 2023, "Are Transformers Effective for Time Series
# Forecasting?". Their test loader drops the last batch of fewer than 32 windows.
REPEAT = {
    ("ETTh1", 96): (1.295, 0.713), ("ETTh1", 720): (1.339, 0.756),
    ("ETTh2", 96): (0.432, 0.422), ("ETTh2", 720): (0.588, 0.517),
    ("ETTm1", 96): (1.214, 0.665), ("ETTm2", 96): (0.266, 0.328),
}  # fmt: skip


@pytest.mark.skipif(not ETT.is_file(), reason="needs ../shared/data/timeseries/ETT-small.zip")
@pytest.mark.parametrize("name", ["ETTh1", "ETTh2", "ETTm1", "ETTm2"])
def test_repeat_baseline_has_the_published_errors(name):
    table = read_table(ETT / f"{name}.csv")
    parts = ltsf_split(table)
    scaling = Scaling.fit(table, parts.train, how="standard")
    with zipfile.ZipFile(ETT) as archive, archive.open(f"ETT-small/{name}.csv") as member:
        raw = np.loadtxt(member, delimiter=",", skiprows=1, usecols=range(1, 8))
    expected = StandardScaler().fit(raw[slice(*parts.train[0])]).transform(raw)
    scaled = scaling.scaled(table.values, torch.zeros(len(table.values), dtype=torch.int64))
    np.testing.assert_allclose(scaled.numpy(), expected, atol=2e-5)
    start, end = parts.test[0]
    for horizon in [steps for file_name, steps in REPEAT if file_name == name]:
        count = (end - start - horizon + 1) // 32 * 32
        actual = scaled[start:end].unfold(0, horizon, 1)[:count].transpose(1, 2)
        last = scaled[start - 1 : start - 1 + count, None]
        forecast = baselines.repeat(last, horizon)
        mse, mae = REPEAT[name, horizon]
        assert metrics.mse(forecast, actual).item() == pytest.approx(mse, abs=0.00051)
        assert metrics.mae(forecast, actual).item() == pytest.approx(mae, abs=0.00051)
