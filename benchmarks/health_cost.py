"""What monitoring a run costs: a trainer step with each kind of monitoring on and off.

Run: python benchmarks/health_cost.py [RECIPE] [--policy POLICY] [--rounds N] [--json PATH]

Whole steps of the trainer, each variant in a process of its own, one after another in every round.
The baseline only skips steps with non-finite gradients. Beside them an eager torch step, alone,
with torch's anomaly detection and with DebugUnderflowOverflow of transformers.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from narrowcast.bench.model import Workbench, set_up
from narrowcast.bench.timing import step_seconds
from narrowcast.precision.step.prepared import prepare
from narrowcast.runs import StepRecord, describe_machine
from narrowcast.training.optimizers import build_optimizer
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads import load_recipe

Step = Callable[[], object]

UNMONITORED = ("steps=1000000000", "eval.every=0", "health.every=0", "health.diagnose=false")
OURS: dict[str, dict[str, Any]] = {
    "guard alone": {},
    "lost updates, every step": {"lost_updates_every": 1},
    "diagnoses": {"overrides": ["health.diagnose=true"]},
    "statistics, every step": {"overrides": ["health.every=1"]},
    "statistics, every 50": {"overrides": ["health.every=50"]},
    "adaptive, idle": {"overrides": ["health.every=50", "precision.adapt.enabled=true"]},
    "average of weights": {"ema_decay": 0.999},
    "deterministic": {"overrides": ["deterministic=true"]},
}
PEERS = ("torch eager", "torch detect_anomaly", "transformers debugger")
WARM_UP = 8


def our_step(
    bench: Workbench, *, policy: str, lost_updates_every: int = 0, ema_decay: float | None = None
) -> Step:
    run = prepare(
        bench.model,
        build_optimizer(bench.recipe.optimizer, bench.model, device=bench.device),
        policy=policy,
        clip_norm=bench.recipe.clip_norm,
        lost_updates_every=lost_updates_every,
        ema_decay=ema_decay,
        emulate=bench.recipe.precision.emulate,
    )
    records = train_loop(run, bench.task, bench.recipe)
    return lambda: next(each for each in records if isinstance(each, StepRecord))


def peer_step(bench: Workbench, name: str) -> Step:
    """Return an eager step: bf16 autocast on a GPU, fp32 elsewhere."""
    model = bench.model_with_loss()
    optimizer = build_optimizer(bench.recipe.optimizer, model, device=bench.device)
    if name == "transformers debugger":
        library: Any = importlib.import_module("transformers.debug_utils")
        model.debugger = library.DebugUnderflowOverflow(model)
    torch.autograd.set_detect_anomaly(name == "torch detect_anomaly")
    batches = bench.stream()

    def region() -> AbstractContextManager[Any]:
        if bench.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", dtype=torch.bfloat16)

    def step() -> None:
        with region():
            loss = model(next(batches))
        loss.backward()
        if bench.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), bench.recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(name: str, recipe: str, policy: str) -> None:
    """Build one variant, then time as many steps as each line of stdin asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if name in OURS:
        options = dict(OURS[name])
        words = [*UNMONITORED, *options.pop("overrides", ())]
        bench = set_up(load_recipe(recipe, words).recipe)
        step = our_step(bench, policy=policy, **options)
    else:
        bench = set_up(load_recipe(recipe, []).recipe)
        step = peer_step(bench, name)
    for _ in range(WARM_UP if bench.device.type == "cuda" else 1):
        step()
    print("[]", file=answers, flush=True)
    for line in sys.stdin:
        seconds = step_seconds(step, int(line), device=bench.device)
        print(json.dumps(seconds), file=answers, flush=True)


def measure(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Wait until all are built, give each a turn in every round, and return a row for each."""
    command = [sys.executable, __file__, options.recipe, "--policy", options.policy, "--worker"]
    processes = {
        name: subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    ready = {name: each for name, each in processes.items() if each.stdout.readline()}
    for _ in range(options.rounds):
        for name, process in ready.items():
            print(options.steps, file=process.stdin, flush=True)
            times[name] += json.loads(process.stdout.readline())
    for process in processes.values():
        process.communicate()
    base = statistics.median(times[names[0]])
    return [
        {"name": name, "ms": 1000 * statistics.median(found)}
        | {"cost": statistics.median(found) / base - 1}
        for name, found in times.items()
        if found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="lm/gpt-124m")
    parser.add_argument("--policy", default="bf16, params=bf16, master=split")
    parser.add_argument("--only", nargs="+", choices=(*OURS, *PEERS), default=(*OURS, *PEERS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.recipe, options.policy)
        return
    begin = time.perf_counter()
    rows = measure(list(options.only), options)
    print(f"| monitored | ms | against {options.only[0]} |\n|---|---|---|")
    for row in rows:
        print(f"| {row['name']} | {row['ms']:.2f} | {100 * row['cost']:+.1f} % |")
    print(f"{time.perf_counter() - begin:.0f} s")
    if options.json:
        found = {"environment": describe_machine(), "recipe": options.recipe, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
