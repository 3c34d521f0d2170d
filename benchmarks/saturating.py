"""A layer that outgrows fp16, with and without adaptive precision, against fp32.

Run: python benchmarks/saturating.py [--json PATH] [--steps N] [--out FOLDER]
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from narrowcast.runs import EvalRecord, PrecisionRecord, RunFolder, StepRecord, describe_machine

RUNS = {
    "fp32": ["precision.policy=fp32", "precision.adapt.enabled=false"],
    "fp16": ["precision.adapt.enabled=false"],
    "fp16, adaptive": [],
}
DIVERGED = 4
"""The exit code of a run that gave up."""


def train(name: str, *, steps: int, out: Path) -> dict[str, Any]:
    words = [*RUNS[name], f"steps={steps}", "--out", str(out), "--quiet"]
    command = [sys.executable, "-m", "narrowcast", "train", "health/saturating", *words]
    code = subprocess.run(command, check=False).returncode
    if code not in (0, DIVERGED):
        raise SystemExit(f"{name} ended with {code}")
    with RunFolder.open(out) as run:
        records = run.records()
    tried = [r for r in records if isinstance(r, StepRecord)]
    evaluated = [r for r in records if isinstance(r, EvalRecord)]
    changes = [r for r in records if isinstance(r, PrecisionRecord)]
    return {
        "run": name,
        "ended": "gave up" if code == DIVERGED else "to the end",
        "last applied step": max(r.step for r in tried if r.applied),
        "skipped": sum(not r.applied for r in tried),
        "evaluated loss": _shown(evaluated[-1].metrics["loss"]),
        "at step": evaluated[-1].step,
        "changes": [f"step {r.step}: {r.module} {r.before} → {r.after}" for r in changes],
    }


def _shown(loss: float) -> float | None:
    return round(loss, 4) if math.isfinite(loss) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="where to keep the runs")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="narrowcast-"))
    rows = [train(name, steps=options.steps, out=folder / str(i)) for i, name in enumerate(RUNS)]
    reference = rows[0]["evaluated loss"]
    print(
        "| run | ended | last applied step | skipped | evaluated loss | % against fp32 | changes |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        loss = row["evaluated loss"]
        percent = round(100 * (loss / reference - 1), 2) if isinstance(loss, float) else None
        row["per cent against fp32"] = percent
        cells = [row[key] for key in ("run", "ended", "last applied step", "skipped")]
        cells += [f"{loss} at step {row['at step']}", percent, "; ".join(row["changes"])]
        print(f"| {' | '.join(map(str, cells))} |")
    if options.json:
        figures = {"environment": describe_machine(), "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
