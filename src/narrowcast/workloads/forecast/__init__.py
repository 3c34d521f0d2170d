"""Forecasting: six models for time series."""

from pathlib import Path

from narrowcast.config.workload import Workload

WORKLOAD = Workload(
    name="forecast",
    about="time series: NLinear, DLinear, N-HiTS, PatchTST, iTransformer and LSTM",
    sections="narrowcast.workloads.forecast.settings:SECTIONS",
    task="narrowcast.workloads.forecast.task:build_task",
    report="narrowcast.workloads.forecast.report:sections",
    recipes=Path(__file__).parent / "recipes",
)
