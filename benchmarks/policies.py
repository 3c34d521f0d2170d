"""A recipe trained in several policies: evaluated loss against the first one, skips, seconds.

Run: python benchmarks/policies.py [RECIPE] [KEY=VALUE ...] [--policies 'P | Q'] [--seeds N]
                                   [--json PATH] [--out FOLDER]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from narrowcast.runs import EvalRecord, RunFolder, StepRecord, describe_machine

BARS = {"bf16": 1.0, "fp16": 1.0, "fp8-tensor": 3.0}
"""How many per cent the evaluated loss of quickstart may differ from that of fp32."""
POLICIES = "fp32 | bf16 | fp16 | fp8-tensor | bf16-pure"
TAIL = 0.05
"""Share of the steps over which the training loss is averaged."""


def smoothed(losses: list[float]) -> list[float]:
    window = min(len(losses), max(10, round(TAIL * len(losses))))
    return [statistics.fmean(losses[i - window : i]) for i in range(window, len(losses) + 1)]


def train(recipe: list[str], policy: str, *, seed: int, out: Path) -> dict[str, Any]:
    words = [*recipe, f"precision.policy={policy}", f"seed={seed}", "--out", str(out), "--quiet"]
    subprocess.run([sys.executable, "-m", "narrowcast", "train", *words], check=True)
    with RunFolder.open(out) as run:
        records = run.records()
    evaluated = [r for r in records if isinstance(r, EvalRecord)]
    steps = [r for r in records if isinstance(r, StepRecord)]
    return {
        "evaluated loss": evaluated[-1].metrics["loss"],
        "losses": [r.loss for r in steps],
        "skipped": sum(not r.applied for r in steps),
        "seconds in steps": sum(r.seconds for r in steps),
        "median seconds": statistics.median(r.seconds for r in steps),
    }


def seconds_to_loss(run: dict[str, Any], target: float) -> float | None:
    """Return the seconds until the smoothed training loss is at `target`."""
    means = smoothed(run["losses"])
    first = len(run["losses"]) - len(means) + 1
    steps = next((n for n, loss in enumerate(means, start=first) if loss <= target), None)
    return None if steps is None else steps * float(run["median seconds"])


def row_of(
    policy: str, runs: list[dict[str, Any]], references: list[dict[str, Any]]
) -> dict[str, Any]:
    """Compare the runs of a policy with those of the first policy, seed by seed."""
    pairs = list(zip(runs, references, strict=True))
    percent = [100 * (a["evaluated loss"] / b["evaluated loss"] - 1) for a, b in pairs]
    reached = [seconds_to_loss(a, smoothed(b["losses"])[-1]) for a, b in pairs]
    return {
        "policy": policy,
        "evaluated loss": round(statistics.fmean(r["evaluated loss"] for r in runs), 4),
        "per cent against first": round(statistics.fmean(percent), 2),
        "training loss": round(statistics.fmean(smoothed(r["losses"])[-1] for r in runs), 4),
        "seconds to its loss": None if None in reached else round(statistics.fmean(reached), 1),
        "skipped": sum(r["skipped"] for r in runs),
        "seconds in steps": round(statistics.fmean(r["seconds in steps"] for r in runs), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="*", default=["quickstart"])
    parser.add_argument("--policies", default=POLICIES, help="policies, with | between them")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--out", type=Path, help="where to keep the runs")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="narrowcast-"))
    policies = [policy.strip() for policy in options.policies.split("|")]
    rows: list[dict[str, Any]] = []
    references: list[dict[str, Any]] = []
    print("| policy | evaluated loss | against first | bar | seconds to its loss | skipped |")
    print("|---|---|---|---|---|---|")
    for number, policy in enumerate(policies):
        runs = [
            train(options.recipe, policy, seed=seed, out=folder / f"{number}-{seed}")
            for seed in range(options.seeds)
        ]
        references = references or runs
        row = row_of(policy, runs, references)
        rows.append(row)
        bar = f"± {BARS[policy]:g} %" if policy in BARS and options.recipe == ["quickstart"] else ""
        against = f"{row['per cent against first']:+.2f} %"
        print(
            f"| {policy} | {row['evaluated loss']} | {against} | {bar} "
            f"| {row['seconds to its loss'] or 'not reached'} | {row['skipped']} |",
            flush=True,
        )
    if options.json:
        figures = {"environment": describe_machine(), "recipe": options.recipe, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
