"""Forecasting against published errors, between precisions, and beside neuralforecast.

Run: python benchmarks/forecast.py ETT-small.zip [--parts repeat accuracy speed] [--json PATH]
         [--models nlinear …] [--sets ETTh1 …] [--horizons 96 …] [--seeds 3]
         [--policies fp32 bf16 fp16] [--device cuda] [--steps 60] [--repeats 3]

The data is ETT-small.zip, or a folder with its CSV files. All errors are of scaled values of all
seven columns, over all test windows of the published split (12, 4 and 4 months).

- `repeat` repeats the last value. It needs no training, so it must equal the published column to
  the last digit. The published loader left out the last, incomplete batch of 32 windows; both
  figures are shown.
- `accuracy` trains the shipped recipes, as `narrowcast train forecast/NAME` does. The mean over
  seeds may exceed the published MSE by 0.005 (horizon 96) to 0.012 (720). The 16-bit policies may
  differ from fp32 by 0.003.
- `speed` trains one model of equal size with the same windows per step in narrowcast and in
  neuralforecast, in turns and one process each. It compares wall time and processor time per step,
  and the test error after equally many steps. Needs `pip install neuralforecast`.

New figures replace those of the same run in an existing JSON file; others stay. Exits with status 1
if a row misses its target.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

import narrowcast as nc
from narrowcast.runs import describe_machine
from narrowcast.workloads.forecast import results
from narrowcast.workloads.forecast.baselines import repeat
from narrowcast.workloads.forecast.data.split import ltsf_split
from narrowcast.workloads.forecast.data.table import read_table
from narrowcast.workloads.forecast.scaling import Scaling, on_device
from narrowcast.workloads.forecast.windows import Starts, find_starts

SETS = ("ETTh1", "ETTh2", "ETTm1", "ETTm2")
HORIZONS = (96, 192, 336, 720)
LOOKBACK, DROPPED_BATCH = 336, 32
BAND = {96: 0.005, 192: 0.007, 336: 0.009, 720: 0.012}
"""How much worse than the published MSE a mean may be."""
CHANGE = 0.003
"""How much a 16-bit policy may change the MSE."""
# MSE and MAE by horizon: DLinear and NLinear from Zeng et al. 2023 (Table 2), PatchTST/42 from Nie
# et al. 2023 (Table 3).
PUBLISHED: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "dlinear": {
        "ETTh1": ((0.375, 0.399), (0.405, 0.416), (0.439, 0.443), (0.472, 0.490)),
        "ETTh2": ((0.289, 0.353), (0.383, 0.418), (0.448, 0.465), (0.605, 0.551)),
        "ETTm1": ((0.299, 0.343), (0.335, 0.365), (0.369, 0.386), (0.425, 0.421)),
        "ETTm2": ((0.167, 0.260), (0.224, 0.303), (0.281, 0.342), (0.397, 0.421)),
    },
    "nlinear": {
        "ETTh1": ((0.374, 0.394), (0.408, 0.415), (0.429, 0.427), (0.440, 0.453)),
        "ETTh2": ((0.277, 0.338), (0.344, 0.381), (0.357, 0.400), (0.394, 0.436)),
        "ETTm1": ((0.306, 0.348), (0.349, 0.375), (0.375, 0.388), (0.433, 0.422)),
        "ETTm2": ((0.167, 0.255), (0.221, 0.293), (0.274, 0.327), (0.368, 0.384)),
    },
    "patchtst": {
        "ETTh1": ((0.375, 0.399), (0.414, 0.421), (0.431, 0.436), (0.449, 0.466)),
        "ETTh2": ((0.274, 0.336), (0.339, 0.379), (0.331, 0.380), (0.379, 0.422)),
        "ETTm1": ((0.290, 0.342), (0.332, 0.369), (0.366, 0.392), (0.420, 0.424)),
        "ETTm2": ((0.165, 0.255), (0.220, 0.292), (0.278, 0.329), (0.367, 0.385)),
    },
}
# Zeng et al. 2023, Table 2, column Repeat.
REPEATED: dict[tuple[str, int], tuple[float, float]] = {
    ("ETTh1", 96): (1.295, 0.713),
    ("ETTh1", 720): (1.339, 0.756),
    ("ETTh2", 96): (0.432, 0.422),
    ("ETTh2", 720): (0.588, 0.517),
    ("ETTm1", 96): (1.214, 0.665),
    ("ETTm1", 720): (1.319, 0.729),
    ("ETTm2", 96): (0.266, 0.328),
    ("ETTm2", 720): (0.521, 0.465),
}
SIZES: dict[tuple[str, str], tuple[str, ...]] = {
    ("patchtst", "ETTh"): (
        "model.width=16", "model.heads=4", "model.mlp_width=128", "model.dropout=0.3",
    ),
    ("patchtst", "ETTm"): (
        "model.width=128", "model.heads=16", "model.mlp_width=256", "model.dropout=0.2",
    ),
}  # fmt: skip
"""Sizes of the papers, per kind of file."""
SPEED: dict[str, tuple[str, ...]] = {
    "nhits": ("model.layers=4",),
    "patchtst": SIZES["patchtst", "ETTh"],
}
"""Settings that make a model as large as its peer's."""
CHANNELS, WINDOWS, WARM = 7, 32, 5
"""Columns of the files; windows per step of the comparison, and its first steps, not counted."""


def unpacked(data: Path, folder: Path) -> Path:
    """Return the folder of the CSV files."""
    if data.is_dir():
        return data
    with zipfile.ZipFile(data) as archive:
        for name in archive.namelist():
            if name.endswith(".csv"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


def repeated(file: Path, horizon: int) -> dict[str, Any]:
    """Return the errors of the repeated last value, of all windows and of whole batches."""
    table = read_table(file)
    rows = ltsf_split(table)
    scaling = Scaling.fit(table, rows.train, how="standard")
    series = on_device(
        table, scaling, lookback=LOOKBACK, horizon=horizon, device=torch.device("cpu")
    )
    starts = find_starts(rows.test, offsets=table.offsets, lookback=LOOKBACK, horizon=horizon)
    row: dict[str, Any] = {"set": file.stem, "horizon": horizon, "windows": len(starts)}
    whole = len(starts) // DROPPED_BATCH * DROPPED_BATCH
    for name, chosen in (("all", starts), ("whole_batches", Starts(starts.rows[:whole]))):
        squared = absolute = 0.0
        for batch in chosen.batches(256):
            window = series.windows(batch)
            error = (window.y - repeat(window.x.mT, horizon).mT).double()
            squared += error.square().sum().item()
            absolute += error.abs().sum().item()
        values = len(chosen) * len(table.channels) * horizon
        row |= {f"mse_{name}": squared / values, f"mae_{name}": absolute / values}
    published = REPEATED.get((file.stem, horizon))
    if published is not None:
        measured = (row["mse_whole_batches"], row["mae_whole_batches"])
        row["published"] = published
        row["equal"] = all(
            abs(a - b) <= 0.0005 + 1e-9 for a, b in zip(measured, published, strict=True)
        )
    return row


def trained(file: Path, model: str, horizon: int, **options: Any) -> dict[str, Any]:
    """Train a shipped recipe, and return its test errors."""
    arguments = [
        f"data.path={file}", "data.split=ltsf", f"horizon={horizon}",
        f"precision.policy={options['policy']}", f"seed={options['seed']}",
        f"device={options['device']}", *SIZES.get((model, file.stem[:4]), ()), *options["more"],
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        run = nc.train(f"forecast/{model}", arguments, out=Path(scratch) / "run")
        outcome = run.finish(progress=False)
        seconds = time.perf_counter() - started
        errors = results.read(Path(scratch) / "run").model
        emulated = run.plan.emulated or any(each.how == "emulated" for each in run.plan.modules)
    return {
        "model": model, "set": file.stem, "horizon": horizon, "policy": options["policy"],
        "seed": options["seed"], "mse": errors.mse, "mae": errors.mae, "steps": outcome.step,
        "skipped": outcome.skipped, "seconds": round(seconds, 1), "emulated": emulated,
        "more": list(options["more"]),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare means over seeds with the published row and with fp32."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["model"], row["set"], row["horizon"], row["policy"])
        groups.setdefault(key, []).append(row)
    compared = []
    for (model, name, horizon, policy), group in groups.items():
        mse = statistics.fmean(row["mse"] for row in group)
        row = {
            "model": model, "set": name, "horizon": horizon, "policy": policy,
            "seeds": len(group), "mse": mse,
            "mae": statistics.fmean(row["mae"] for row in group),
            "spread": statistics.stdev(row["mse"] for row in group) if len(group) > 1 else None,
        }  # fmt: skip
        published = PUBLISHED.get(model, {}).get(name)
        if published is not None:
            row["published"] = published[HORIZONS.index(horizon)]
            row["within"] = mse <= row["published"][0] + BAND[horizon]
        fp32 = {
            each["seed"]: each["mse"] for each in groups.get((model, name, horizon, "fp32"), ())
        }
        if policy != "fp32" and all(each["seed"] in fp32 for each in group):
            row["change"] = mse - statistics.fmean(fp32[each["seed"]] for each in group)
            row["change_within"] = abs(row["change"]) <= CHANGE
        compared.append(row)
    return compared


def narrowcast_side(file: Path, model: str, *, steps: int, device: str) -> dict[str, Any]:
    """Train one model with narrowcast, and time its steps."""
    arguments = [
        f"data.path={file}", "data.split=ltsf", "horizon=96", f"lookback={LOOKBACK}",
        f"steps={steps}", f"batch_size={WINDOWS}", "optimizer.name=adam", "optimizer.lr=1e-3",
        "optimizer.weight_decay=0", "lr_schedule.name=constant", "lr_schedule.warmup=0",
        "clip_norm=none", "precision.policy=fp32", "eval.every=0", "eval.patience=0",
        "eval.keep_best=false", "data.eval_windows=32", f"device={device}", *SPEED[model],
    ]  # fmt: skip
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as scratch:
        run = nc.train(f"forecast/{model}", arguments, out=Path(scratch) / "run")
        for record in run:
            if type(record).__name__ == "StepRecord":
                walls.append(time.perf_counter())
                cpus.append(time.process_time())
        errors = results.read(Path(scratch) / "run").model
        size = sum(each.numel() for each in run.model.parameters())
    return {**_per_step(walls, cpus), "mse": errors.mse, "mae": errors.mae, "parameters": size}


def neuralforecast_side(file: Path, model: str, *, steps: int, device: str) -> dict[str, Any]:
    """Train one model with neuralforecast, and time its steps."""
    import logging
    import warnings

    import pandas as pd
    import pytorch_lightning as pl
    from neuralforecast import NeuralForecast
    from neuralforecast.losses.pytorch import MSE
    from neuralforecast.models import NHITS, PatchTST

    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    walls: list[float] = []
    cpus: list[float] = []

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if device != "cpu":
                torch.cuda.synchronize()
            walls.append(time.perf_counter())
            cpus.append(time.process_time())

    test = 2880
    table = pd.read_csv(file, parse_dates=["date"]).set_index("date").iloc[: 8640 + 2 * test]
    train = table.iloc[:8640]
    table = (table - train.mean()) / train.std(ddof=0)
    series = table.reset_index(names="ds").melt("ds", var_name="unique_id", value_name="y")
    kind: Any = {"nhits": NHITS, "patchtst": PatchTST}[model]
    own: dict[str, Any] = {"hidden_size": 16, "n_heads": 4, "linear_hidden_size": 128,
                           "encoder_layers": 3, "dropout": 0.3}  # fmt: skip
    network = kind(
        h=96,
        input_size=LOOKBACK,
        max_steps=steps,
        loss=MSE(),
        scaler_type="identity",
        learning_rate=1e-3,
        num_lr_decays=0,
        batch_size=CHANNELS,
        windows_batch_size=WINDOWS * CHANNELS,
        inference_windows_batch_size=1024,
        random_seed=0,
        accelerator="cpu" if device == "cpu" else "gpu",
        callbacks=[Clock()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        val_check_steps=10**6,
        **(own if model == "patchtst" else {}),
    )
    forecaster = NeuralForecast([network], freq="h")
    frame = series.astype({"y": "float32"})
    forecasts = forecaster.cross_validation(
        frame, val_size=test, test_size=test, step_size=1, n_windows=None, verbose=0
    )
    (column,) = set(forecasts.columns) - {"unique_id", "ds", "cutoff", "y"}
    error = forecasts[column] - forecasts["y"]
    size = sum(each.numel() for each in forecaster.models[0].parameters())
    return {
        **_per_step(walls, cpus),
        "mse": float((error**2).mean()),
        "mae": float(error.abs().mean()),
        "parameters": size,
    }


def _per_step(walls: list[float], cpus: list[float]) -> dict[str, float]:
    """Return seconds per step after the first ones: the median of wall time, all processor time."""
    between = [b - a for a, b in zip(walls[WARM:], walls[WARM + 1 :], strict=False)]
    return {
        "wall_seconds": statistics.median(between),
        "cpu_seconds": (cpus[-1] - cpus[WARM]) / len(between),
    }


SIDES = {"narrowcast": narrowcast_side, "neuralforecast": neuralforecast_side}


def compared(file: Path, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides in turns, each in its own process, and return medians and ratios."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            command = [
                sys.executable, __file__, str(file.parent), "--side", side, "--models", model,
                "--steps", str(options.steps), "--device", options.device,
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{side} failed:\n{done.stderr[-2000:]}")
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    row: dict[str, Any] = {
        "model": model, "steps": options.steps, "windows": WINDOWS * CHANNELS,
        "threads": torch.get_num_threads(), "device": options.device, "runs": runs,
    }  # fmt: skip
    for side, each in runs.items():
        row[side] = {key: statistics.median(run[key] for run in each) for key in each[0]}
    ours, theirs = row["narrowcast"], row["neuralforecast"]
    row["wall_ratio"] = theirs["wall_seconds"] / ours["wall_seconds"]
    row["cpu_ratio"] = theirs["cpu_seconds"] / ours["cpu_seconds"]
    row["target"] = 1.2 if options.device == "cpu" else 3.0
    row["within"] = row["wall_ratio"] >= row["target"]
    return row


def merged(old: list[dict[str, Any]], new: dict[str, Any], *keys: str) -> list[dict[str, Any]]:
    """Return rows with a new one in place of that of the same run."""
    same = [row for row in old if any(row[key] != new[key] for key in keys)]
    return [*same, new]


def print_tables(figures: dict[str, Any]) -> None:
    for row in figures.get("repeat", ()):
        whole = f"{row['mse_whole_batches']:.3f}/{row['mae_whole_batches']:.3f}"
        everything = f"{row['mse_all']:.3f}/{row['mae_all']:.3f}"
        print(f"repeat {row['set']} {row['horizon']}: {whole} (all windows {everything})"
              f" published {row.get('published', '')}")  # fmt: skip
    for row in figures.get("summary", ()):
        change = f" change {row['change']:+.4f}" if "change" in row else ""
        spread = "" if row["spread"] is None else f" ± {row['spread']:.4f}"
        print(f"{row['model']} {row['set']} {row['horizon']} {row['policy']}: "
              f"{row['mse']:.4f}{spread}/{row['mae']:.4f} published {row.get('published', '')}"
              f" {'' if row.get('within', True) else 'MISSED'}{change}")  # fmt: skip
    for row in figures.get("speed", ()):
        ours, theirs = row["narrowcast"], row["neuralforecast"]
        print(f"{row['model']} on {row['device']}: {1 / ours['wall_seconds']:.1f} steps/s, "
              f"neuralforecast {1 / theirs['wall_seconds']:.1f}; {row['wall_ratio']:.2f} × "
              f"(processor time {row['cpu_ratio']:.2f} ×); test MSE {ours['mse']:.3f} and "
              f"{theirs['mse']:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="ETT-small.zip, or a folder with its files")
    parser.add_argument("--parts", nargs="+", default=["repeat", "accuracy", "speed"],
                        choices=["repeat", "accuracy", "speed"])  # fmt: skip
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--horizons", nargs="+", type=int, default=list(HORIZONS), choices=HORIZONS)
    parser.add_argument("--policies", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--more", nargs="*", default=[], help="further KEY=VALUE of accuracy")
    parser.add_argument("--steps", type=int, default=60, help="steps of the speed comparison")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the speed comparison")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if options.side:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        side, file = SIDES[options.side], options.data / "ETTh1.csv"
        (model,) = options.models
        print(json.dumps(side(file, model, steps=options.steps, device=options.device)))
        return
    figures: dict[str, Any] = {}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text())
    figures["environment"] = describe_machine()

    def save() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        folder = unpacked(options.data, Path(scratch))
        files = [next(folder.rglob(f"{name}.csv")) for name in options.sets]
        if "repeat" in options.parts:
            figures["repeat"] = [repeated(file, each) for file in files for each in (96, 720)]
            save()
        if "accuracy" in options.parts:
            for seed in range(options.seeds):
                for model in options.models or ("nlinear", "dlinear", "patchtst"):
                    for file in files:
                        for horizon in options.horizons:
                            for policy in options.policies:
                                row = trained(
                                    file, model, horizon, policy=policy, seed=seed,
                                    device=options.device, more=options.more,
                                )  # fmt: skip
                                keys = ("model", "set", "horizon", "policy", "seed")
                                figures["rows"] = merged(figures.get("rows", []), row, *keys)
                                figures["summary"] = summary(figures["rows"])
                                save()
        if "speed" in options.parts:
            for model in options.models or SPEED:
                if model in SPEED:
                    row = compared(next(folder.rglob("ETTh1.csv")), model, options)
                    keys = ("model", "device")
                    figures["speed"] = merged(figures.get("speed", []), row, *keys)
                    save()
    print_tables(figures)
    judged = [*figures.get("summary", ()), *figures.get("speed", ())]
    fine = all(row.get("within", True) and row.get("change_within", True) for row in judged)
    fine = fine and all(row.get("equal", True) for row in figures.get("repeat", ()))
    if not (fine and all(math.isfinite(row["mse"]) for row in figures.get("rows", ()))):
        sys.exit(1)


if __name__ == "__main__":
    main()
