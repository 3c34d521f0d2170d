"""The formats of each phase, and the change from one to the next."""

from collections.abc import Mapping
from typing import final

from narrowcast.config.sections import Recipe
from narrowcast.config.strategy import StrategySection
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.plan.phases import PHASES, Phase, PhasePolicies
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.precision_schedule import WHOLE
from narrowcast.training.setup import make_loss_scales
from narrowcast.training.task import Task


def phase_policies(strategy: StrategySection, policy: str) -> Mapping[Phase, str]:
    """Return the policy of each phase as text; `policy` comes from the recipe."""
    match strategy.precision:
        case "policy":
            chosen = PhasePolicies(auto_recommend=False, default=policy)
        case "recommended":
            chosen = PhasePolicies()
        case "conservative":
            chosen = PhasePolicies.conservative()
        case "aggressive":
            chosen = PhasePolicies.aggressive()
    for phase, text in strategy.policies.items():
        chosen = chosen.with_phase(phase, text)
    return {phase: chosen.policy(phase) for phase in PHASES}


@final
class PhaseFormats:
    """Changes a prepared model to the formats of a phase."""

    def __init__(self, prepared: Prepared, recipe: Recipe, task: Task) -> None:
        self._prepared = prepared
        self._scale = make_loss_scales(recipe.precision.loss_scale, task)
        self.texts = phase_policies(recipe.strategy, recipe.precision.policy)
        """Policy of each phase as written."""
        self._plans: dict[Phase, Plan] = {}
        if recipe.strategy.has_phase_policies:
            for phase in PHASES:
                self._plans[phase] = self._planned(recipe, phase, gemm_rows=task.gemm_rows)
        self.apply("warmup", step=0)

    def apply(self, phase: Phase, *, step: int) -> list[PrecisionRecord]:
        """Change the model to the formats of a phase. Synchronises if anything changes.

        A loss scale that `full` needs is kept through phases that need none.
        """
        plan = self._plans.get(phase)
        before = self._prepared.plan.policy
        if plan is None or plan.policy == before:
            return []
        # Only phases with backward passes use a scale, and `full` is the one that comes back.
        keep = self._plans["full"].policy.needs_loss_scale
        self._prepared.set_policy(plan, loss_scale=self._scale, keep_scale=keep)
        record = PrecisionRecord(
            # A prediction is between two steps: none is trained in its formats.
            step=step + (phase in ("warmup", "full")),
            module=WHOLE,
            before=str(before),
            after=str(plan.policy),
            reason=f"the phase {phase} begins",
        )
        return [record]

    def _planned(self, recipe: Recipe, phase: Phase, *, gemm_rows: int) -> Plan:
        try:
            plan = plan_recipe_model(
                recipe,
                self._prepared.model,
                policy=self.texts[phase],
                hardware=self._prepared.plan.hardware,
                gemm_rows=gemm_rows,
            )
            self._prepared.engine.check_plan_change(plan, loss_scale=self._scale, keep_scale=True)
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"phase {phase} of the strategy: {error}") from error
        return plan
