"""The formats of each phase, and the change from one to the next."""

from collections.abc import Callable, Mapping
from typing import final

from narrowcast.config.strategy import StrategySection
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.gradients.loss_scale import Settings
from narrowcast.precision.plan.phases import PHASES, Phase, PhasePolicies
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord
from narrowcast.training.precision_schedule import WHOLE


def phase_policies(strategy: StrategySection, policy: str) -> Mapping[Phase, str]:
    """Return the policy of each phase as text; `policy` is that of the run."""
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


def present_phases(strategy: StrategySection) -> tuple[Phase, ...]:
    """Return the phases that a run with these settings has."""
    return PHASES if strategy.has_jumps else PHASES[:2]


@final
class PhaseFormats:
    """Changes a prepared model to the formats of a phase."""

    def __init__(
        self,
        prepared: Prepared,
        strategy: StrategySection,
        *,
        policy: str,
        planned: Callable[[str], Plan],
        loss_scale: Settings | None,
    ) -> None:
        """Take the policy of the run, and what plans the model for another one."""
        self._prepared, self._scale = prepared, loss_scale
        self.texts = phase_policies(strategy, policy)
        """Policy of each phase as written."""
        self._plans: dict[Phase, Plan] = {}
        if strategy.has_phase_policies:
            for phase in present_phases(strategy):
                self._plans[phase] = self._checked(phase, planned)
        self.apply("warmup", step=0)

    def apply(self, phase: Phase, *, step: int) -> list[PrecisionRecord]:
        """Change the model to the formats of a phase, from this step on.

        Synchronises if anything changes. A loss scale that `full` needs is kept through phases that
        need none.
        """
        plan = self._plans.get(phase)
        before = self._prepared.plan.policy
        if plan is None or plan.policy == before:
            return []
        # Only phases with backward passes use a scale, and `full` is the one that comes back.
        keep = self._plans["full"].policy.needs_loss_scale
        self._prepared.set_policy(plan, loss_scale=self._scale, keep_scale=keep)
        record = PrecisionRecord(
            step=step,
            module=WHOLE,
            before=str(before),
            after=str(plan.policy),
            reason=f"the phase {phase} begins",
        )
        return [record]

    def _checked(self, phase: Phase, planned: Callable[[str], Plan]) -> Plan:
        try:
            plan = planned(self.texts[phase])
            self._prepared.engine.check_plan_change(plan, loss_scale=self._scale, keep_scale=True)
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"phase {phase} of the strategy: {error}") from error
        return plan
