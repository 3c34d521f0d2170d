"""Six neuralforecast models through the Lightning plug-in: does low precision cost accuracy?

Run: python benchmarks/neuralforecast_models.py ETTh1.csv [--steps N] [--seeds N] [--json PATH]

The file is ETTh1.csv, or a zip with it. Each model trains on the first 16 months and is tested on
the next 4, the usual split. It trains with the plug-in in fp32, bf16 and fp16, and with the first
seed also without the plug-in, which must equal fp32 exactly. For bf16 and fp16, the mean absolute
error over all seeds must be within 1 % of that of fp32. Forecasts are made by the plain fp32 model
that `fit` leaves behind. The table shows the spread of fp32 over seeds as a measure of noise.

Exits with status 1 if a row misses its target. Needs `pip install neuralforecast`, which narrowcast
does not depend on.
"""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import neuralforecast
import pandas as pd
import pytorch_lightning as pl
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NBEATS, NHITS, TFT, PatchTST, TSMixer

from narrowcast.integrations.lightning import NarrowcastPrecision
from narrowcast.runs import describe_machine

HORIZON, WINDOW, TRAIN, TEST = 24, 96, 8640 + 2880, 2880
PLAIN = "no plug-in"
POLICIES = (PLAIN, "fp32", "bf16", "fp16")
TOLERANCE = 0.01
"""Largest allowed change of the error, relative to fp32."""
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "NHITS": (NHITS, {"mlp_units": 3 * [[128, 128]]}),
    "NBEATS": (NBEATS, {"mlp_units": 3 * [[128, 128]]}),
    "PatchTST": (PatchTST, {"hidden_size": 32, "n_heads": 4, "linear_hidden_size": 64}),
    "TFT": (TFT, {"hidden_size": 32}),
    "LSTM": (LSTM, {"encoder_hidden_size": 64, "decoder_hidden_size": 64}),
    "TSMixer": (TSMixer, {"n_series": 7, "ff_dim": 32}),
}


def read_series(path: Path) -> pd.DataFrame:
    """Return the seven series in the layout of neuralforecast, scaled by the training months."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith("ETTh1.csv"))
            with archive.open(name) as file:
                table = pd.read_csv(file, parse_dates=["date"])
    else:
        table = pd.read_csv(path, parse_dates=["date"])
    table = table.set_index("date").iloc[: TRAIN + TEST]
    table = (table - table.iloc[:TRAIN].mean()) / table.iloc[:TRAIN].std()
    long = table.reset_index(names="ds").melt("ds", var_name="unique_id", value_name="y")
    return long.astype({"y": "float32"})


class PlanReader(pl.Callback):
    """Keep what the plan of a fit says about the formats that really run."""

    def __init__(self) -> None:
        self.formats: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        plan = trainer.precision_plugin.run.plan
        formats = Counter(each.to_json()["forward"] for each in plan.modules)
        self.formats = {"modules_by_format": dict(formats), "emulated": plan.emulated}


def train(name: str, policy: str, series: pd.DataFrame, *, steps: int, seed: int) -> dict[str, Any]:
    """Train one model and return its error on the test months."""
    kind, settings = MODELS[name]
    if policy != PLAIN:
        settings = {
            **settings,
            "plugins": [NarrowcastPrecision(policy)],
            "callbacks": [PlanReader()],
        }
    model = kind(
        h=HORIZON,
        input_size=WINDOW,
        max_steps=steps,
        windows_batch_size=128,
        random_seed=seed,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **settings,
    )
    started = time.perf_counter()
    forecaster = NeuralForecast([model], freq="h")
    forecasts = forecaster.cross_validation(
        series, test_size=TEST, step_size=HORIZON, n_windows=None, verbose=0
    )
    row: dict[str, Any] = {"model": name, "policy": policy, "seed": seed}
    (column,) = set(forecasts.columns) - {"unique_id", "ds", "cutoff", "y"}
    row["mae"] = float((forecasts[column] - forecasts["y"]).abs().mean())
    row["seconds"] = round(time.perf_counter() - started, 1)
    if policy != PLAIN:  # neuralforecast trains copies of the model, the plug-in and the callback
        trained = forecaster.models[0].trainer_kwargs
        stats = trained["plugins"][0].stats
        row |= {"applied": stats.applied, "skipped": stats.skipped}
        row |= trained["callbacks"][0].formats
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare every model and policy with fp32, seed by seed."""
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        errors.setdefault((row["model"], row["policy"]), {})[row["seed"]] = row["mae"]
    compared = []
    for (model, policy), by_seed in errors.items():
        fp32 = errors[model, "fp32"]
        changes = [mae / fp32[seed] - 1 for seed, mae in by_seed.items()]
        mean = statistics.fmean(fp32[seed] for seed in by_seed)
        change = statistics.fmean(by_seed.values()) / mean - 1
        spread = statistics.stdev(fp32.values()) / mean if len(fp32) > 1 else None
        compared.append(
            {
                "model": model,
                "policy": policy,
                "seeds": len(by_seed),
                "mae": statistics.fmean(by_seed.values()),
                "change": change,
                "largest_change_of_a_seed": max(changes, key=abs),
                "fp32_spread_over_seeds": spread,
                "within": change == 0 if policy == PLAIN else abs(change) <= TOLERANCE,
            }
        )
    return compared


def print_table(compared: list[dict[str, Any]]) -> None:
    print(
        "| model | policy | seeds | MAE | change | largest of one seed | fp32 over seeds | within |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in compared:
        spread = row["fp32_spread_over_seeds"]
        cells = (
            row["model"],
            row["policy"],
            row["seeds"],
            f"{row['mae']:.4f}",
            f"{row['change']:+.2%}",
            f"{row['largest_change_of_a_seed']:+.2%}",
            "" if spread is None else f"± {spread:.2%}",
            "yes" if row["within"] else "no",
        )
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="ETTh1.csv, or a zip with it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    series, rows = read_series(options.data), []
    figures: dict[str, Any] = {"environment": describe_machine(), "steps": options.steps}
    figures["neuralforecast"] = neuralforecast.__version__
    for name in options.models:
        for policy in POLICIES:
            for seed in range(1 if policy == PLAIN else options.seeds):
                rows.append(train(name, policy, series, steps=options.steps, seed=seed))
        figures |= {"summary": summary(rows), "rows": rows}
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print_table(figures["summary"])
    if not all(row["within"] for row in figures["summary"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
