"""The plan of a run as in plan.json and `narrowcast plan --json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from narrowcast.config import Recipe
from narrowcast.numerics import FORMATS
from narrowcast.precision.plan.plan import Plan
from narrowcast.strategies.hybrid.plan import STRATEGY, described
from narrowcast.training.phase_plans import phases_json


def plan_json(
    recipe: Recipe, plans: Sequence[Plan], *, task_row: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the plan a run starts with, its phases, its task's row and its strategy."""
    info = phases_json(recipe, plans, task_row=task_row)
    strategy = strategy_row(recipe, plans[0])
    return info if strategy is None else {**info, STRATEGY: strategy}


def strategy_row(recipe: Recipe, plan: Plan) -> dict[str, Any] | None:
    """Return the strategy of a run as plain data; None for plain training."""
    grads = FORMATS[plan.policy.grads_format].bytes if plan.policy.params != "fp32" else 4
    return described(recipe, trained_weights=round(plan.bytes.get("grads", 0) / grads))
