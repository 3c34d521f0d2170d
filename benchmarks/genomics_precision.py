"""A fine-tuning step of genomics in each precision: time and memory, with the result beside.

Run: python benchmarks/genomics_precision.py [--device cuda] [--steps N] [--results JSON] [--quick]
                                             [--json PATH]

Trains `genomics/variant_effect` on random sequences through the trainer itself, a Hyena model and a
CNN of transformer-like size, in fp32, tf32, fp16, bf16 and fp8: the median time of the last half of
the steps and the peak of the memory, one precision after the other in one process. `--results` is
the JSON of a finished `benchmarks/genomics.py` for promoters: its test MCC by precision stands
beside. The source's own table has 3.5, 4 and 8 times the speed of fp32, without a word on what was
timed; these are whole training steps.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import narrowcast as nc
from narrowcast.runs import StepRecord, describe_machine

POLICIES = {
    "fp32": ("precision.policy=fp32",),
    "tf32": ("precision.policy=tf32",),
    "fp16": ("precision.policy=fp16",),
    "bf16": ("precision.policy=bf16",),
    "fp8": ("precision.policy=fp8-delayed",),
    "fp8, split": ("precision.policy=fp8-delayed, params=bf16, master=split",),
}
SHAPES = {
    "hyena 768x12, 32x1024": ("hyena", 768, 12, 1024, 32),
    "cnn 768x8, 32x1024": ("cnn", 768, 8, 1024, 32),
    "hyena 1024x8, 4x16384": ("hyena", 1024, 8, 16_384, 4),
}
QUICK = {"hyena 32x1, 4x64": ("hyena", 32, 1, 64, 4)}
COMMON = (
    "epochs=none", "eval.every=0", "eval.keep_best=false", "eval.patience=0", "health.every=0",
    "checkpoint.every=0", "memory.activation_checkpointing=none", "gradient_accumulation_steps=1",
)  # fmt: skip


def write_sequences(path: Path, *, length: int, rows: int) -> None:
    """Write so many sequences of one length, each with one of two classes."""
    drawn = random.Random(0)
    lines = ["sequence,label"]
    lines += [f"{''.join(drawn.choices('ACGT', k=length))},{row % 2}" for row in range(rows)]
    path.write_text("\n".join(lines) + "\n")


def measure(shape: tuple[str, int, int, int, int], policy: tuple[str, ...], *, device: str,
            steps: int) -> dict[str, Any]:  # fmt: skip
    """Return what a step takes, or why it cannot be taken."""
    backbone, width, layers, length, rows = shape
    settings = [
        *COMMON, *policy, f"device={device}", f"steps={steps}", f"model.backbone={backbone}",
        f"model.width={width}", f"model.layers={layers}", f"data.max_length={length}",
        f"batch_size={rows}",
    ]  # fmt: skip
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sequences.csv"
        write_sequences(path, length=length, rows=10 * rows)
        settings.append(f"data.path={path}")
        try:
            records = list[StepRecord]()
            with nc.train("genomics/variant_effect", settings, out=Path(folder) / "run") as run:
                for record in run:
                    if isinstance(record, StepRecord):
                        records.append(record)
                    if len(records) == steps:  # what follows is judging, which is not timed
                        break
        except nc.errors.NarrowcastError as error:
            return {"refused": str(error)}
    seconds = statistics.median(record.seconds for record in records[steps // 2 :])
    peak = max((record.peak_bytes or 0) for record in records) / 2**30
    return {"ms": 1e3 * seconds, "gib": peak, "loss": records[-1].loss, "steps": len(records)}


def test_mcc(path: Path | None) -> dict[str, float]:
    """Return the mean test MCC × 100 of each precision for the promoters of 70 letters."""
    if path is None:
        return {}
    found: dict[str, list[float]] = {}
    for row in json.loads(path.read_text())["results"]:
        if row["question"] == "prom_core_tata cnn" and not row["baseline"]:
            name = row["policy"].replace("-delayed", "")
            found.setdefault(name, []).append(100 * row["test"]["mcc"])
    return {name: statistics.mean(each) for name, each in found.items()}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write what there is so far: whoever ends the run has what is done."""
    environment = describe_machine()
    found = {"environment": environment, "command": sys.argv[1:], "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, steps = ("cpu", 4) if args.quick else (args.device, args.steps)
    mcc, rows = test_mcc(args.results), []
    print(f"{'model, batch':26} {'precision':11} {'ms':>8} {'×':>6} {'GiB':>7} {'of fp32':>8} MCC")
    for name, shape in (QUICK if args.quick else SHAPES).items():
        base: dict[str, Any] = {}
        for precision, policy in POLICIES.items():
            row = measure(shape, policy, device=device, steps=steps)
            rows.append({"model": name, "precision": precision, **row, "mcc": mcc.get(precision)})
            if args.json:
                write(args.json, rows)
            if "refused" in row:
                print(f"{name:26} {precision:11} refused: {row['refused']}")
                continue
            base = base or row
            held = row["gib"] / base["gib"] if base["gib"] else float("nan")
            print(
                f"{name:26} {precision:11} {row['ms']:8.2f} {base['ms'] / row['ms']:6.2f} "
                f"{row['gib']:7.2f} {held:8.2f} {mcc.get(precision, float('nan')):.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
