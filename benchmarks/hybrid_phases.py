"""Do the phases predict and correct pay? `aggressive` against `balanced` on a small quickstart.

Run: python benchmarks/hybrid_phases.py --json PATH [--seeds N] [--steps N]

Both presets train as many steps. Those of predict and correct have no backward pass, so
`aggressive` needs fewer step equivalents: a forward pass counts a third of a training step.
"""

import argparse
import json
from pathlib import Path

import torch

import narrowcast as nc
from narrowcast.runs import EvalRecord, StrategyRecord, describe_machine

SMALL = ["model.layers=1", "model.width=32", "health.every=0", "precision.policy=fp32",
         "samples.tokens=0", "strategy=hybrid"]  # fmt: skip
PRESETS = {
    "balanced": ["strategy.preset=balanced"],
    "aggressive": ["strategy.preset=aggressive", "strategy.jumps.budget=0.2"],
    "aggressive, bf16 in predict": [
        "strategy.preset=aggressive", "strategy.jumps.budget=0.2", "strategy.policies.predict=bf16"
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| preset | seed | loss | step equivalents | accepted | predict | correct |")
    print("|---|---|---|---|---|---|---|")
    for seed in range(args.seeds):
        for name, words in PRESETS.items():
            every = f"eval.every={args.steps}"
            words = [*SMALL, *words, f"seed={seed}", f"steps={args.steps}", every]
            rows.append(row := {"preset": name, "seed": seed, **measured(words)})
            print(
                f"| {name} | {seed} | {row['loss']:.4f} | {row['step equivalents']:.1f} "
                f"| {row['jumps accepted']:.0f} of {row['jumps tried']:.0f} "
                f"| {row['steps in predict']:.0f} | {row['steps in correct']:.0f} |",
                flush=True,
            )
    about = {"environment": describe_machine(), "recipe": "quickstart", "settings": SMALL}
    args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def measured(words: list[str]) -> dict[str, float]:
    """Return the loss of a run, what it cost and what its predictions came to."""
    records = list(nc.train("quickstart", words))
    loss = [each.metrics["loss"] for each in records if isinstance(each, EvalRecord)][-1]
    (summary,) = (
        each for each in records if isinstance(each, StrategyRecord) and each.event == "summary"
    )
    steps = summary.values["steps in warmup"] + summary.values["steps in full"]
    counts = {"step equivalents": steps, "jumps tried": 0.0, "jumps accepted": 0.0}
    wanted = (*counts, "steps in predict", "steps in correct")
    return {"loss": loss, **counts} | {k: v for k, v in summary.values.items() if k in wanted}


if __name__ == "__main__":
    main()
