"""Hybrid training in the plan of a run: sentences and bytes."""

from typing import Any

from narrowcast.config.common_sections import OBEYED_BY
from narrowcast.config.sections import Recipe
from narrowcast.precision.plan.phases import PHASES
from narrowcast.strategies.hybrid.jumps import check_first_jump
from narrowcast.strategies.hybrid.phase_formats import phase_policies

STRATEGY = "strategy"
"""Key of the strategy in plan.json."""


def described(recipe: Recipe, *, trained_weights: int) -> dict[str, Any] | None:
    """Return the strategy of a recipe as plain data; None for plain training."""
    strategy = recipe.strategy
    if not strategy.is_hybrid:
        return None
    if strategy.has_jumps and recipe.is_settled:
        check_first_jump(recipe)
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
        "policies": {phase: policies[phase] for phase in PHASES},
    }


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
    if strategy.has_phase_policies:
        policies = phase_policies(strategy, recipe.precision.policy)
        there = PHASES if strategy.has_jumps else PHASES[:2]
        lines.append("formats by phase: " + ", ".join(f"{policies[p]} in {p}" for p in there))
    if strategy.has_jumps:
        jumps = strategy.jumps
        lines.append(
            f"jumps of the weights along a line, judged on {jumps.micro_batches} batches, for at "
            f"most {jumps.budget:.0%} of the run's work. In benchmarks they rarely paid off"
        )
    return lines
