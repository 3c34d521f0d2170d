"""Forecast a table of hourly series with intervals, and check the forecast at earlier origins.

Run: python examples/forecast.py [FILE.csv] [HORIZON]
"""

import sys

import numpy as np
import pandas as pd

from narrowcast.forecast import Forecaster


def example_frame():
    """Return sixty days of two hourly series."""
    rng, hours = np.random.default_rng(0), np.arange(24 * 60)
    day = np.sin(2 * np.pi * hours / 24)
    return pd.DataFrame(
        {
            "ds": pd.date_range("2024-01-01", periods=len(hours), freq="h"),
            "load": 50 + 10 * day + rng.normal(0, 1, len(hours)),
            "price": 30 - 5 * day + rng.normal(0, 2, len(hours)),
        }
    )


table = sys.argv[1] if len(sys.argv) > 1 else example_frame()
horizon = int(sys.argv[2]) if len(sys.argv) > 2 else 24

forecaster = Forecaster("nlinear", horizon=horizon, lookback=3 * horizon, epochs=5)
forecaster.fit(table, progress=False)
bands = forecaster.predict_intervals(levels=[80])
print(bands.head(3).to_string(index=False, float_format="%.1f"))

checked = forecaster.cross_validation(table, windows=3, progress=False)
error = (checked["forecast"] - checked["y"]).abs().groupby(checked["unique_id"]).mean()
for name, mae in error.items():
    print(f"{name}: mean absolute error {mae:.2f} over {checked['cutoff'].nunique()} origins")
