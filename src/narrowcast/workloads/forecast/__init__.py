"""Forecasting: six models for time series."""

from pathlib import Path

from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="forecast",
    about="time series: NLinear, DLinear, N-HiTS, PatchTST, iTransformer and LSTM",
    sections="narrowcast.workloads.forecast.settings:SECTIONS",
    task="narrowcast.workloads.forecast.task:build_task",
    report="narrowcast.workloads.forecast.report:sections",
    commands=(
        Command(
            "forecast",
            "narrowcast.workloads.forecast.command:forecast",
            about="forecasts with a finished run",
        ),
    ),
    recipes=Path(__file__).parent / "recipes",
)
