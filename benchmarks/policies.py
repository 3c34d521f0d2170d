"""The quickstart model trained in each policy: evaluated loss against fp32, skips, seconds.

Run: python benchmarks/policies.py [--json PATH] [--steps N] [--out FOLDER]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from narrowcast.runs import EvalRecord, RunFolder, StepRecord, describe_machine

POLICIES = {"fp32": None, "bf16": 1.0, "fp16": 1.0, "fp8-tensor": 3.0, "bf16-pure": None}
"""By name; how many per cent the evaluated loss may differ from that of fp32."""


def train(policy: str, *, steps: int, out: Path) -> dict[str, object]:
    words = [f"precision.policy={policy}", f"steps={steps}", "--out", str(out), "--quiet"]
    command = [sys.executable, "-m", "narrowcast", "train", "quickstart", *words]
    subprocess.run(command, check=True)
    with RunFolder.open(out) as run:
        records = run.records()
    evaluated = [r for r in records if isinstance(r, EvalRecord)]
    tried = [r for r in records if isinstance(r, StepRecord)]
    return {
        "policy": policy,
        "evaluated loss": round(evaluated[-1].metrics["loss"], 4),
        "skipped": sum(not r.applied for r in tried),
        "seconds in steps": round(sum(r.seconds for r in tried), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="where to keep the runs")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="narrowcast-"))
    rows = [train(policy, steps=options.steps, out=folder / policy) for policy in POLICIES]
    reference = float(str(rows[0]["evaluated loss"]))
    print("| policy | evaluated loss | against fp32 | bar | skipped | seconds in steps |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        percent = 100 * (float(str(row["evaluated loss"])) / reference - 1)
        row["per cent against fp32"] = round(percent, 2)
        bar = POLICIES[str(row["policy"])]
        print(
            f"| {row['policy']} | {row['evaluated loss']} | {percent:+.2f} % | "
            f"{'' if bar is None else f'± {bar:g} %'} | {row['skipped']} | "
            f"{row['seconds in steps']} |"
        )
    if options.json:
        figures = {"environment": describe_machine(), "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
