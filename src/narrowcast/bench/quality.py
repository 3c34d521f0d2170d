"""`bench quality`: the same model, data and seeds in several policies, trained to the end.

What counts at the end is not steps per second but how soon a loss is reached. The reference is a
policy too, fp32 or tf32. Runs are compared seed by seed: one seed means the same weights and the
same batches in the same order.
"""

import gc
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, final

import torch

from narrowcast.bench.catalogue import Bench, by_device
from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.learning import quality_figures
from narrowcast.bench.measure.timing import held_bytes
from narrowcast.bench.model import device_of, in_policy
from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
from narrowcast.hardware import probe
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.trainer import train
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.lm.settings import LmData

TELL_SECONDS = 15.0
"""Between two lines of progress."""

BENCH = Bench(
    peers={},
    default_peers=by_device(cuda="none", elsewhere="none"),
    default_policies=by_device(
        cuda="tf32 | bf16 | bf16, params=bf16, master=split | fp16 | fp8-tensor | fp8-delayed",
        elsewhere="fp32 | bf16",
    ),
    # Nothing is built before it is a contender's turn, so that all can wait at once.
    bytes_of=lambda recipe, settings: _require_text(recipe),
    assemble=quality_figures,
    policies_first=True,
)


def subject(job: Mapping[str, Any]) -> "Training":
    """Return what a worker does."""
    recipe = load_recipe(job["recipe"], job["overrides"]).recipe
    contender = Contender.from_json(job["contender"])
    return Training(recipe, contender.options["policy"], seeds=job["settings"]["seeds"])


@final
class Training:
    """Trains a recipe in one policy, once for each seed."""

    def __init__(self, recipe: Recipe, policy: str, *, seeds: int) -> None:
        self._recipe, self._policy, self._seeds = recipe, policy, seeds

    def ready(self) -> dict[str, Any]:
        """Take nothing of the device yet."""
        return {"held_bytes": 0}

    def measure(self, request: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """Train with each seed: the recipe's, and those that follow it."""
        recipe = in_policy(self._recipe, self._policy)
        first = recipe.seed
        runs = [
            _trained(recipe.model_copy(update={"seed": seed}), tell)
            for seed in range(first, first + self._seeds)
        ]
        return {"runs": runs, "held_bytes": held_bytes(device_of(recipe))}


def _trained(recipe: Recipe, tell: Callable[[str], None]) -> dict[str, Any]:
    """Train one run, and return its losses and what its last evaluation found."""
    # Of the run before: its model lives in reference cycles, its code in the compiler.
    gc.collect()
    torch.compiler.reset()
    hardware = probe(recipe.device)
    task = build_task(recipe, device=torch.device(hardware.device))
    plan = plan_recipe_model(recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)
    recipe = recipe.for_samples(len(task.train_data))
    prepared = prepare_recipe(recipe, task, plan=plan)
    steps: list[StepRecord] = []
    metrics: dict[str, float] = {}
    told = time.monotonic()
    for record in train(prepared, task, recipe):
        match record:
            case StepRecord():
                steps.append(record)
            case EvalRecord():
                metrics = record.metrics
            case _:
                pass  # findings and checkpoints decide nothing here
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            tell(f"seed {recipe.seed}, step {len(steps)} of {recipe.steps}")
    return {
        "seed": recipe.seed,
        "losses": [record.loss for record in steps],
        "step_seconds": median(record.seconds for record in steps),
        "skipped": sum(not record.applied for record in steps),
        "peak_bytes": max(record.peak_bytes for record in steps),
        "metrics": metrics,
        "task": task.info.to_json(),
    }


def _require_text(recipe: Recipe) -> int:
    """Refuse random tokens; return what a waiting contender takes: nothing."""
    if isinstance(recipe.data, LmData) and recipe.data.synthetic:
        raise RecipeError(
            "data.text=synthetic: nothing can be learnt from random tokens, so losses say nothing "
            "of quality; name text files, e.g. data.text=corpus/*.txt, or data.text=python-topics"
        )
    return 0
