"""What may change when a run is continued, and what that change means."""

from collections.abc import Sequence

from narrowcast.config import LoadedRecipe, Recipe, from_resolved
from narrowcast.config.phases import last_step
from narrowcast.errors import RecipeError
from narrowcast.precision.plan.plan import Plan
from narrowcast.runs import RunFolder
from narrowcast.workloads import sections_of

MAY_CHANGE = (
    "steps",
    "device",
    "checkpoint.every",
    "checkpoint.keep",
    "eval.every",
    "data.workers",
    "data.prefetch",
    "trackers",
)
"""Settings that do not decide what a step does; all others belong to the run as it began."""


def continued(run: RunFolder, overrides: Sequence[str]) -> tuple[LoadedRecipe, LoadedRecipe]:
    """Return the recipe of `run` as it was, and with `overrides`; refuse those that may not be."""
    resolved, text = run.read_json("resolved.json"), run.recipe_text
    before = from_resolved(resolved, sections=sections_of, text=text)
    after = from_resolved(resolved, overrides, sections=sections_of, text=text)
    was, is_now = before.resolved(), after.resolved()
    changed = [key for key in is_now if was.get(key, {}).get("value") != is_now[key]["value"]]
    refused = [key for key in changed if not _may_change(key, before.recipe)]
    if refused:
        listed = ", ".join(f"{key} (it is {was[key]['value']})" for key in refused)
        raise RecipeError(
            f"a run that is continued keeps the settings it began with, but other values were "
            f"given for {listed}; leave them out, or start a new run with `narrowcast train`. "
            f"Only these may change: {', '.join(MAY_CHANGE)}"
        )
    return before, after


def notices(run: RunFolder, before: Recipe, after: Recipe, *, plan: Plan) -> list[str]:
    """Say where the rest of `run` will not be what it would have been."""
    found = []
    if before.steps != after.steps and after.lr_schedule.name != "constant":
        found.append(
            f"the {after.lr_schedule.name} learning rate now ends at step {after.steps} instead "
            f"of {before.steps}, so it is not where it stopped"
        )
    if _ends(before) != _ends(after):
        found.append(
            f"phases that end at a share of the run do so of {after.steps} steps now, and no "
            "longer where they would have"
        )
    was = run.read_json("plan.json") if (run.path / "plan.json").exists() else {}
    was.pop("phases", None)  # `plan` is the first one's
    if was and was != plan.to_json():
        found.append(
            f"the run began on {was.get('hardware')}; its formats run differently on "
            f"{plan.to_json()['hardware']}, so it is not continued bit for bit"
        )
    return found


def _may_change(key: str, before: Recipe) -> bool:
    # What auto stood for depends on the machine; the checkpoint refuses any other policy anyway.
    named_auto = key == "precision.policy" and before.precision.policy == "auto"
    return key in MAY_CHANGE or named_auto


def _ends(recipe: Recipe) -> list[int | None]:
    return [last_step(phase.until, steps=recipe.steps) for phase in recipe.precision.schedule]
