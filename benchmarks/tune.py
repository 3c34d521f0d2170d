"""How long does `tune` take, and is its policy better than the best preset at equal seconds?

On a GPU: python benchmarks/tune.py [RECIPE] [--json PATH] [--steps N] [--seconds N]
On a CPU: python benchmarks/tune.py quickstart --hardware h200 --steps 20 --json PATH

Tunes a recipe (lm/gpt-350m by default) under several budgets of loss, and notes seconds, passes and
the check run of each. With `--seconds` it then trains the recipe from its start with the chosen
policy and with every preset that is within the budget, each for so many seconds of steps, and
compares the mean training loss of the last tenth of its steps. The bar: tuning takes at most three
minutes on an H200, and at equal seconds no preset ends at a lower loss, or a preset was chosen.

`--plant NAME` multiplies the weights of a layer by 1e4 first. The search must find it and keep it
in 16 bits or more.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import narrowcast as nc
from narrowcast.precision.plan.policy import short_text
from narrowcast.runs import StepRecord, describe_machine
from narrowcast.tuning.result import TuneResult

BUDGETS = ("loss=0.1%", "loss=0.5%", "loss=2%")
SHARE = 0.1
"""Of a run's steps, those whose loss is compared."""


def tuned(recipe: str, overrides: list[str], *, budget: str, options: Any) -> dict[str, Any]:
    """Tune a recipe once; return what was chosen and how long that took."""
    lines: list[str] = []
    begin = time.perf_counter()
    result = nc.tune_recipe(
        recipe,
        overrides,
        budget=budget,
        hardware=options.hardware,
        check_steps=options.steps,
        progress=lines.append,
    )
    seconds = time.perf_counter() - begin
    print(f"{recipe} {budget}: {seconds:.0f} s, {short_text(result.policy)}", flush=True)
    for line in result.lines:
        print(f"  {line}", flush=True)
    return {"budget": budget, "seconds": seconds, "progress_lines": len(lines), **_short(result)}


def _short(result: TuneResult) -> dict[str, Any]:
    data = result.to_json()
    data["front"] = len(data["front"])
    return data


def planted(options: Any) -> dict[str, Any]:
    """Tune with a layer whose weights are 1e4 times as large; return its group."""
    from narrowcast.training.data import batch_order, make_batches
    from narrowcast.training.optimizers import build_optimizer, get_groups
    from narrowcast.training.phase_plans import recipe_execution
    from narrowcast.workloads import build_task

    recipe = nc.load_recipe(options.recipe, options.overrides).recipe
    device = torch.device(nc.detect_hardware(recipe.device).device)
    task = build_task(recipe, device=device)
    with torch.no_grad():
        task.model.get_submodule(options.plant).weight.mul_(1e4)
    optimizer = build_optimizer(
        recipe.optimizer, task.model, device=device, groups=get_groups(task)
    )
    order = batch_order(len(task.train_data), recipe)
    with make_batches(task, recipe, order, start=0, device=device) as batches:
        result = nc.tune(
            task.model,
            batches,
            task.loss,
            budget=options.budgets[0],
            optimizer=optimizer,
            hardware=options.hardware,
            gemm_rows=task.gemm_rows,
            execution=recipe_execution(recipe),
            check_steps=0,
            progress=lambda line: None,
        )
    (group,) = [group for group in result.groups if options.plant in group.layers]
    print(f"planted {options.plant}: {group.label}, {group.chosen}, {group.reason}", flush=True)
    return {"layer": options.plant, "group": group.to_json(), "policy": short_text(result.policy)}


def train_for(recipe: str, overrides: list[str], policy: str, *, seconds: float) -> dict[str, Any]:
    """Train for so many seconds of steps; return the loss of the last tenth of them."""
    run = nc.train(recipe, [*overrides, f"precision.policy={policy}", "steps=1000000"])
    losses, taken = [], 0.0
    with run:
        for record in run:
            if isinstance(record, StepRecord):
                losses.append(record.loss)
                taken += record.seconds
                if taken >= seconds:
                    break
    last = losses[-max(round(len(losses) * SHARE), 1) :]
    row = {"policy": policy, "steps": len(losses), "seconds": taken, "loss": sum(last) / len(last)}
    print(f"  {policy}: {row['steps']} steps, loss {row['loss']:.4f}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="lm/gpt-350m")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--hardware", help="GPU to tune for; by default the one here")
    parser.add_argument("--steps", type=int, default=40, help="steps of the check run")
    parser.add_argument("--seconds", type=float, default=0.0, help="of training per policy")
    parser.add_argument("--plant", metavar="MODULE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "environment": describe_machine(),
        "recipe": options.recipe,
        "overrides": options.overrides,
        "hardware": options.hardware,
        "rows": [],
    }

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    for budget in options.budgets:
        row = tuned(options.recipe, options.overrides, budget=budget, options=options)
        if options.seconds:
            presets = [each["policy"] for each in row["presets"] if each["fits"]]
            policies = dict.fromkeys([row["policy"], *presets])
            row["equal_seconds"] = [
                train_for(options.recipe, options.overrides, policy, seconds=options.seconds)
                for policy in policies
            ]
        result["rows"].append(row)
        save()
    if options.plant:
        result["planted"] = planted(options)
        save()


if __name__ == "__main__":
    main()
