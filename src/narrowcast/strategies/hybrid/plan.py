"""Hybrid training in the plan of a run: sentences and bytes."""

from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.config.common_sections import OBEYED_BY
from narrowcast.config.sections import Recipe
from narrowcast.precision.plan.phases import Phase
from narrowcast.precision.plan.plan import Plan
from narrowcast.strategies.hybrid.history import SNAPSHOTS
from narrowcast.strategies.hybrid.phase_formats import phase_policies, present_phases
from narrowcast.strategies.hybrid.phases import NO_PREDICTIONS, check_first_jump
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.task import Task

STRATEGY = "strategy"
"""Key of the strategy in plan.json."""


def described(
    recipe: Recipe, plans: Mapping[Phase, Plan], *, trained_weights: int
) -> dict[str, Any]:
    """Return the hybrid strategy of a recipe as plain data; `plans` has the phases of the run."""
    strategy = recipe.strategy
    if strategy.has_jumps and recipe.is_settled:
        check_first_jump(
            strategy, steps=recipe.steps, micro_batches=recipe.gradient_accumulation_steps
        )
    lead = {"fp32": 4, "bf16": 2}[strategy.lookahead.storage] if strategy.has_lookahead else 0
    averages = len(set(strategy.readout.half_lives))
    policies = phase_policies(strategy, recipe.precision.policy)
    return {
        "name": strategy.name,
        "preset": strategy.preset,
        "lines": list(_lines(recipe, averages=averages)),
        "bytes": {
            "lookahead": lead * trained_weights,
            "averages": 4 * averages * trained_weights,
        },
        "phases": {
            phase: {
                "policy": policies[phase],
                "bytes": _phase_bytes(phase, plan, trained_weights=trained_weights)
                if strategy.has_jumps
                else dict(plan.bytes),
            }
            for phase, plan in plans.items()
        },
    }


def phase_plans(recipe: Recipe, plan: Plan, *, build: Callable[[], Task]) -> dict[Phase, Plan]:
    """Return the plan of each phase that a recipe has; `plan` is that of precision.policy.

    `build` returns the task on the meta device; it is called if the phases differ.
    """
    phases = present_phases(recipe.strategy)
    if not recipe.strategy.has_phase_policies:
        return dict.fromkeys(phases, plan)
    task, policies = build(), phase_policies(recipe.strategy, recipe.precision.policy)
    return {
        phase: plan_recipe_model(
            recipe,
            task.model,
            policy=policies[phase],
            hardware=plan.hardware,
            gemm_rows=task.gemm_rows,
        )
        for phase in phases
    }


def _phase_bytes(phase: Phase, plan: Plan, *, trained_weights: int) -> dict[str, int]:
    """Return the predicted bytes of a phase by role, without activations."""
    past = {"past weights": (4 + 2 * (SNAPSHOTS - 1)) * trained_weights}
    if phase in ("warmup", "full"):
        return {**plan.bytes, **past}
    held = plan.bytes.get("params", 0) + plan.bytes.get("master", 0)
    there = {role: n for role, n in plan.bytes.items() if role != "grads"}
    return {**there, **past, "prediction": 4 * trained_weights + held}


def _momentum(recipe: Recipe) -> str:
    """Return the note that Adam's momentum is off, if it has one."""
    beta1 = recipe.optimizer.betas[0]
    has_one = "betas" in OBEYED_BY[recipe.optimizer.name] and beta1
    return f", instead of the optimizer's momentum (beta1 is 0, not {beta1:g})" if has_one else ""


def _lines(recipe: Recipe, *, averages: int) -> list[str]:
    strategy, lines = recipe.strategy, list[str]()
    if recipe.lr_schedule.name != "constant" and strategy.lr_horizon != 1:
        lines.append(
            f"the {recipe.lr_schedule.name} learning rate is planned for {strategy.lr_horizon:g} "
            "times the steps, so the run ends before it has fallen"
        )
    if averages:
        word = "averages" if averages > 1 else "average"
        lines.append(
            f"{averages} {word} of the weights. The run returns the best of them or the trained "
            f"weights, chosen on held-out batches for {100 * strategy.readout.budget:g}% of the "
            "run's work, or by an evaluation of each if the task has no such batches"
        )
    if strategy.has_lookahead:
        settings, after = strategy.lookahead, strategy.lookahead_after
        begins = f"after {after} steps " if after else ""
        lines.append(
            f"{begins}each gradient is taken {settings.interpolation:g} of the way from the "
            f"newest weights to their average, which moves by {settings.rate:g} per step"
            f"{_momentum(recipe)}"
        )
    if strategy.has_jumps:
        jumps = strategy.jumps
        lines.append(
            "steps without a backward pass in predict and correct: the weights follow a line, "
            f"verified on {jumps.micro_batches} micro-batches each time. Rejected predictions may "
            f"cost {100 * jumps.budget:g}% of the run's work. In benchmarks they did not pay off"
        )
    else:
        lines.append(NO_PREDICTIONS)
    return lines
