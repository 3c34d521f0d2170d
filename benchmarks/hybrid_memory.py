"""What hybrid training keeps for each weight, stage by stage, beside plain fp32 training.

Run: python benchmarks/hybrid_memory.py [--width N] [--layers N] [--json PATH]

Prepares one GPT in each way, takes a step, and asks the run what it holds: weights, gradients,
master weights, moments, leads, averages, past weights. Activations are left out: they are the same
in all of them but for the format of the policy.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import narrowcast as nc
from narrowcast.runs import describe_machine

COMMON = ("steps=1", "batch_size=1", "eval.every=0", "health.every=0", "data.eval_windows=1")
SPLIT = "precision.policy=bf16, params=bf16, master=split"
INT8 = f"{SPLIT}, moments=int8"
STAGES = {
    "plain, fp32": ("precision.policy=fp32",),
    "plain, bf16 weights, split masters": (SPLIT,),
    "plain, and moments of 8 bits": (INT8,),
    "conservative, fp32, two averages": (
        "precision.policy=fp32", "strategy=hybrid", "strategy.preset=conservative"),
    "balanced, fp32, lead and two averages": ("precision.policy=fp32", "strategy=hybrid"),
    "balanced, 8-bit moments, bf16 lead, one average": (
        INT8, "strategy=hybrid", "strategy.lookahead.storage=bf16",
        "strategy.readout.half_lives=[0.05]"),
    "balanced, 8-bit moments, bf16 lead, no average": (
        INT8, "strategy=hybrid", "strategy.lookahead.storage=bf16",
        "strategy.readout.half_lives=[]"),
}  # fmt: skip
ROLES = ("params", "grads", "master", "moments", "lookahead", "averages")


def measure(words: tuple[str, ...], shape: list[str]) -> dict[str, float]:
    """Return the bytes that a run holds for each weight, by role."""
    run = nc.train("quickstart", [*COMMON, *shape, *words])
    list(run)
    held = dict(run.prepared.stats().bytes)
    readouts = getattr(run._assembled.strategy, "readouts", None)
    held["averages"] = readouts.bank.bytes() if readouts is not None else 0
    weights = sum(p.numel() for p in run.model.parameters())
    return {role: held.get(role, 0) / weights for role in ROLES}


def main() -> None:
    """Measure every stage, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shape = [f"model.width={asked.width}", f"model.layers={asked.layers}"]
    rows: dict[str, Any] = {}
    for name, words in STAGES.items():
        print(name, file=sys.stderr)
        rows[name] = measure(words, shape)
    whole = sum(rows["plain, fp32"].values())
    if asked.json is not None:
        environment = describe_machine()
        result = {"environment": environment, "bytes_per_weight": rows}
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"| bytes a weight | {' | '.join(ROLES)} | all | less than fp32 |")
    print("|---" * (len(ROLES) + 3) + "|")
    for name, row in rows.items():
        total = sum(row.values())
        cells = " | ".join(f"{row[role]:.2f}" for role in ROLES)
        print(f"| {name} | {cells} | {total:.2f} | {1 - total / whole:.0%} |")


if __name__ == "__main__":
    main()
