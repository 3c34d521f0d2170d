"""One matrix of a language model, decomposed: what masked passes lose."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decompose_reference.kept import Told, records_of, watched
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


GPT_SITE = "blocks.2.mlp.up"
"""1,024 × 256, of four layers."""
GPT = (
    "data.tokenizer=bytes", "data.length=256", "data.eval_windows=256", "model.layers=4",
    "model.width=256", "model.heads=4", "batch_size=64", "steps=3000", "optimizer.lr=1e-3",
    "lr_schedule.warmup=100", "eval.every=500", "health.every=0", "precision.policy=bf16",
)  # fmt: skip
"""The language model that `gpt` trains first: 3.3 million weights on bytes of the text."""
GPT_WORDS = (
    f"sites.names=[{GPT_SITE}]",
    "sites.components=1024",
    "importance.hidden=[256]",
    "data.text=[]",  # the text that it was trained on
    "data.length=256",
    "batch_size=64",
    "steps=20000",
    "eval.every=2500",
    "health.every=0",
)


def run_stories(options: argparse.Namespace, told: Told) -> dict[str, Any]:
    """Decompose a matrix of a published model, and return what the last evaluation says."""
    if not options.model or not options.text:
        raise SystemExit("stories needs --model FOLDER (a folder of llama2.c) and --text FILE")
    where = {"model.path": f"{options.model}", "data.text": f"[{options.text}]"}
    return taken_apart(where, WORDS, options, name="stories", told=told)


def run_gpt(options: argparse.Namespace, told: Told) -> dict[str, Any]:
    """Train a language model of workload `lm`, and decompose a matrix of it."""
    if not options.text:
        raise SystemExit("gpt needs --text FILE, which it is trained on")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep / "gpt-target" if options.keep else Path(scratch) / "gpt"
        words = [f"data.text={options.text}", f"device={options.device}", *GPT, *options.target]
        records = records_of("quickstart", words, folder)
        losses = [each for each in records if isinstance(each, EvalRecord)]
        where = {"model.path": f"{folder}"}
        found = taken_apart(where, GPT_WORDS, options, name="gpt", told=told)
    named = [f"data.text={options.text.name}", *GPT, *options.target]
    target = {"command": " ".join(["narrowcast train quickstart", *named])}
    return found | {"target": target | losses[-1].metrics}


def taken_apart(
    where: dict[str, str],
    words: Sequence[str],
    options: argparse.Namespace,
    *,
    name: str,
    told: Told,
) -> dict[str, Any]:
    """Decompose what `where` names, and return losses and the table of masks."""
    settings = [*words, f"device={options.device}", *options.words]
    began, processor = time.perf_counter(), time.process_time()
    evaluations, losses, steps = list[dict[str, Any]](), dict[str, float](), 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep / name if options.keep else Path(scratch) / "run"
        given = [f"{key}={value}" for key, value in where.items()]
        run = records_of("decompose/lm", [*given, *settings], folder)
        for record in watched(run, told):
            if isinstance(record, StepRecord):
                steps, losses = record.step, record.loss_parts
            elif isinstance(record, EvalRecord):
                evaluations.append({"step": record.step, **record.metrics})
        found = judged(folder)
    # Names alone: where the files lay is nobody's business.
    named = [
        f"{key}={'[' * ('[' in value)}{value.rpartition('/')[2]}" for key, value in where.items()
    ]
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
