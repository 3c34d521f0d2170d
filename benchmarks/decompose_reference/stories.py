"""One matrix of a published language model, decomposed on a CPU: what masked passes lose."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.workloads.decompose.report import schema

SITE = "model.layers.2.mlp.up_proj"
"""172 × 64, in the middle of five layers."""
WORDS = (
    f"sites.names=[{SITE}]",
    "sites.components=256",
    "importance.hidden=[128]",
    "data.length=128",
    "batch_size=4",
    "steps=1200",
    "optimizer.lr=1e-3",
    "eval.every=300",
    "health.every=0",
)
"""About five minutes of one core; the recipe has 17 times the steps, and a fifth of the rate."""


def run_stories(options: argparse.Namespace) -> dict[str, Any]:
    """Decompose a matrix, and return what the last evaluation says."""
    import narrowcast as nc

    if not options.model or not options.text:
        raise SystemExit("stories needs --model FOLDER (a folder of llama2.c) and --text FILE")
    where = [f"model.path={options.model}", f"data.text=[{options.text}]"]
    settings = [*WORDS, f"device={options.device}", *options.words]
    began, processor = time.perf_counter(), time.process_time()
    evaluations, losses, steps = list[dict[str, Any]](), dict[str, float](), 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep / "stories" if options.keep else Path(scratch) / "run"
        for record in nc.train("decompose/lm", [*where, *settings], out=folder):
            if isinstance(record, StepRecord):
                steps, losses = record.step, record.parts
            elif isinstance(record, EvalRecord):
                evaluations.append({"step": record.step, **record.metrics})
        found = judged(folder)
    named = [f"model.path={options.model.name}", f"data.text=[{options.text.name}]"]
    return {
        "command": " ".join(["narrowcast train decompose/lm", *named, *settings]),
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "losses": losses,
        "evaluations": evaluations,
        **found,
    }


def judged(folder: Path) -> dict[str, Any]:
    """Return what a finished run's folder says of masked passes, and of the adversary."""
    found = schema.read(folder)
    return {"masks": [each.model_dump() for each in found.language], "pgd": list(found.pgd)}


def print_stories(told: dict[str, Any]) -> None:
    """Print the table of masks, and how many components are in use, evaluation by evaluation."""
    print(f"\n{told['command']}")
    print("| masks | cross-entropy | more than the target | of what zero loses | KL |")
    print("|---|---|---|---|---|")
    for each in told["masks"]:
        cells = [each[key] for key in ("cross_entropy", "ce_difference", "ce_unrecovered", "kl")]
        texts = ["" if cell is None else f"{cell:.4f}" for cell in cells]
        print(f"| {each['mask']} | {' | '.join(texts)} |")
    for ascents, divergence in told["pgd"]:
        print(f"KL under the worst masks that {ascents} steps find: {divergence:.4f}")
    print("\n| step | L0 | alive | faithfulness | KL ci | KL stochastic |")
    print("|---|---|---|---|---|---|")
    for each in told["evaluations"]:
        print(
            f"| {each['step']} | {each['l0']:.1f} | {each['alive']:.0f} | "
            f"{each['faithfulness']:.2e} | {each['kl/ci']:.4f} | {each['kl/stochastic']:.4f} |"
        )
    print(f"{told['steps']} steps, {told['processor_seconds']} s on the processor")
