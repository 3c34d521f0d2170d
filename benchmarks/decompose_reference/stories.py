"""One matrix of a published language model, decomposed on a CPU: what masked passes lose."""

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from narrowcast.runs import EvalRecord, StepRecord

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
"""About five minutes of one core. The rate is five times the recipe's, whose steps are 17 times as many."""
MASKINGS = ("target", "unmasked", "stochastic", "ci", "rounded", "random", "zero")


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
    named = [f"model.path={options.model.name}", f"data.text=[{options.text.name}]"]
    return {
        "command": " ".join(["narrowcast train decompose/lm", *named, *settings]),
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "losses": losses,
        "evaluations": evaluations,
    }


def print_stories(told: dict[str, Any]) -> None:
    """Print the table of masks, and how many components are in use, evaluation by evaluation."""
    print(f"\n{told['command']}")
    last = told["evaluations"][-1]
    print("| masks | cross-entropy | more than the target | KL |\n|---|---|---|---|")
    for name in MASKINGS:
        if (ce := last.get(f"ce/{name}")) is None:
            continue
        kl = last.get(f"kl/{name}", math.nan)
        print(f"| {name} | {ce:.4f} | {ce - last['ce/target']:+.4f} | {kl:.4f} |")
    print("\n| step | L0 | alive | faithfulness | KL ci | KL stochastic |\n|---|---|---|---|---|---|")
    for each in told["evaluations"]:
        print(
            f"| {each['step']} | {each['l0']:.1f} | {each['alive']:.0f} | "
            f"{each['faithfulness']:.2e} | {each['kl/ci']:.4f} | {each['kl/stochastic']:.4f} |"
        )
    print(f"{told['steps']} steps, {told['processor_seconds']} s on the processor")
