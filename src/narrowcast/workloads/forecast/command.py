"""`narrowcast forecast`: forecasts from a finished run."""

import csv
import io
import sys
from pathlib import Path

import click

from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.runs.writing import written_atomically


@click.group()
def forecast() -> None:
    """Forecast with a finished run."""


@forecast.command()
@click.argument("run")
@click.argument("table", required=False)
@click.option("--future", metavar="FILE", help="Table with the columns that are known ahead.")
@click.option(
    "--level",
    "levels",
    type=float,
    multiple=True,
    help="Coverage of an interval in percent. May be repeated.",
)
@click.option("-o", "--output", default="-", help="CSV file to write.  [default: stdout]")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or cuda:N.")
def predict(
    run: str,
    table: str | None,
    future: str | None,
    levels: tuple[float, ...],
    output: str,
    device: str,
) -> None:
    """Forecast the rows after TABLE with RUN, a run folder or a saved forecaster.

    Without TABLE, forecast the rows after the table of the run. The columns of TABLE are those of
    the run's. The output is a long table with one row per series and date.
    """
    import torch

    from narrowcast.hardware import detect_hardware
    from narrowcast.workloads.forecast.data.table import read_table
    from narrowcast.workloads.forecast.predictor import Predictor

    path = None if output == "-" else expand_path(output)
    if path is not None and path in [expand_path(each) for each in (table, future) if each]:
        raise ConfigError(f"--output must not be an input, got {output}. Name another file.")
    predictor = Predictor(expand_path(run), device=torch.device(detect_hardware(device).device))
    series = predictor.trained.table
    if table is not None:
        series = read_table(expand_path(table), series.layout)
    ahead = None if future is None else expand_path(future)
    columns = predictor.forecast(series, future=ahead, levels=levels)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(map(_cell, each) for each in columns.values()), strict=True))
    if path is None:
        sys.stdout.write(text.getvalue())
        return
    with written_atomically(Path(path), hint="nothing was written") as file:
        file.write_text(text.getvalue())


def _cell(value: object) -> str:
    """Return a date as ISO text without trailing zeros, and a number with the digits of fp32."""
    if isinstance(value, float):
        return f"{value:.7g}"
    text = str(value)
    return text.removesuffix(".000000000").replace("T", " ") if text[:1].isdigit() else text
