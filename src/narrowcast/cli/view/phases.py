"""The phases of a scheduled run, for people."""

from collections.abc import Sequence

from rich.console import Console

from narrowcast.cli.view.screen import say
from narrowcast.config import Recipe
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import policy_from
from narrowcast.report.phrases import size
from narrowcast.training.phase_plans import end_text, get_phases, phases_json


def print_phases(console: Console, recipe: Recipe, plans: Sequence[Plan]) -> None:
    """Say which policy holds until when; nothing for a run that has one policy."""
    for number, phase in enumerate(phases_json(recipe, plans).get("phases", []), start=1):
        memory = size(sum(phase["bytes"].values()))
        text = f"{phase['policy']}, until {phase['until']}; {memory} and activations"
        say(console, f"phase {number}", text)
    if len(plans) > 1:
        console.print()


def course_text(recipe: Recipe) -> str:
    """Say how a scheduled run goes on after its first policy; nothing for a run with one."""
    phases = get_phases(recipe.precision)
    ends = [end_text(phase.until, steps=recipe.steps) for phase in phases]
    pairs = zip(ends, phases[1:], strict=False)
    return "".join(f"; after {end} {phase.policy}" for end, phase in pairs)


def is_scaled(recipe: Recipe, plan: Plan) -> bool:
    """Say whether any phase of a run has a loss scale, the first of which is planned as given."""
    later = get_phases(recipe.precision)[1:]
    policies = [policy_from(phase.policy or "default", plan.hardware) for phase in later]
    return any(policy.needs_loss_scale for policy in [plan.policy, *policies])


def titles(recipe: Recipe) -> list[str]:
    """Return what stands above the table of each phase."""
    phases = get_phases(recipe.precision)
    if len(phases) == 1:
        return [recipe.name]
    return [f"{recipe.name}, phase {n} of {len(phases)}" for n in range(1, len(phases) + 1)]
