"""Adaptive precision: health readings decide the format of each module, overflows that of all.

Readings take effect one step late, when a GPU's host has them without waiting.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, final

from narrowcast.config.sections import Recipe
from narrowcast.health.adapt import Adaptation, Ladder, Limits
from narrowcast.health.diagnose.investigator import StepDiagnosis
from narrowcast.precision.plan.gains import rungs
from narrowcast.precision.plan.module_plan import GRADIENTS, multiplies
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy, short_text
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord, Record, StepRecord
from narrowcast.training.observing import Observer
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.precision_schedule import WHOLE

Issues = list[tuple[str, str, str]]


@final
class Adapter:
    """Gives modules with numerical problems a wider format, and their own back after calm steps."""

    def __init__(self, prepared: Prepared, recipe: Recipe, *, gemm_rows: int) -> None:
        self._prepared, self._recipe, self._gemm_rows = prepared, recipe, gemm_rows
        self._seen: deque[tuple[int, Issues, list[str]]] = deque()
        self.begin()

    def begin(self) -> None:
        """Use the active plan as the policy's own: at the start, and in each phase."""
        self._ladder = Ladder()
        own = self._prepared.plan
        self._rungs: tuple[Policy, ...] = (own.policy,)
        if self._recipe.precision.adapt.overflows:
            self._rungs = rungs(own.policy, own.hardware)
        self._stand_on(own)
        for wider in self._rungs[1:]:  # raises before the run, not during it
            self._prepared.engine.check_plan_change(self._planned(wider), keep_scale=True)

    def _stand_on(self, plan: Plan) -> None:
        """Make this the plan that modules are widened from and return to."""
        settings = self._recipe.precision.adapt
        self._seen.clear()  # in other formats
        self._own = plan
        self._adaptation = Adaptation(
            {m.name: m.policy.forward for m in plan.modules if multiplies(m.kind)},
            Limits(
                most=settings.max_fraction, cooldown=settings.cooldown, calm=settings.calm_steps
            ),
        )

    def own(self) -> Mapping[str, Policy]:
        """Return the policy's own formats for each module that has a wider format now."""
        return {name: self._own.module(name).policy for name in self._adaptation.overrides}

    def observed(
        self, observer: Observer, record: StepRecord, message: StepDiagnosis
    ) -> Iterator[Record]:
        """Yield the health records and findings of a step, and take note of them."""
        looked = observer.looked
        yield from observer.account(record, explained=message.explained)
        if message.injected:
            return  # injected faults are not a reason to change a format
        if record.step < self._ladder.since:
            return  # in the formats of another rung
        adapt = self._recipe.precision.adapt
        self._ladder = self._ladder.after(
            record.step,
            applied=record.applied,
            limit=adapt.overflows,
            calm=adapt.calm_steps,
            top=len(self._rungs) - 1,
        )
        if message.overflowed_at is not None:
            module, role = message.overflowed_at
            self.blame(record.step, module, role, loss_scale=record.loss_scale)
        elif observer.looked != looked:
            self.note(
                observer.looked,
                observer.issues,
                unsafe_to_lower=observer.unsafe_to_lower,
                loss_scale=record.loss_scale,
            )

    def note(
        self, step: int, issues: Issues, *, unsafe_to_lower: list[str], loss_scale: float
    ) -> None:
        """Store the issues that a step's reading shows, to act on one step later."""
        if not self._recipe.precision.adapt.enabled:
            return
        left = [t for t in issues if not self._is_left_to_scale(t[0], t[2], loss_scale)]
        self._seen.append((step, left, unsafe_to_lower))

    def blame(self, step: int, module: str, role: str, *, loss_scale: float) -> None:
        """Store where a step overflowed, to act on one step later."""
        enabled = self._recipe.precision.adapt.enabled
        if enabled and not self._is_left_to_scale("overflow", role, loss_scale):
            self._seen.append((step, [("overflow", module, role)], []))

    def decide(self, step: int) -> list[PrecisionRecord]:
        """Return the changes that start with the step after this one; `apply` makes them."""
        if self._ladder.is_due(step):
            return [self._climb(step)]
        result = []
        while self._seen and self._seen[0][0] < step:
            seen, issues, unsafe_to_lower = self._seen.popleft()
            moves = self._adaptation.decide(
                issues, seen=seen, step=step, unsafe_to_lower=unsafe_to_lower
            )
            result += [
                PrecisionRecord(
                    step=step + 1,
                    module=move.module,
                    before=move.before,
                    after=move.after,
                    reason=move.reason,
                )
                for move in moves
            ]
        return result

    def apply(self) -> None:
        # A loss scale that fp16 needs is kept in wider formats until fp16 returns.
        self._prepared.set_policy(self._planned(), keep_scale=self._ladder.rung > 0)

    def state_dict(self) -> dict[str, Any]:
        seen = [
            [step, [list(t) for t in matched], list(unsafe_to_lower)]
            for step, matched, unsafe_to_lower in self._seen
        ]
        ladder = asdict(self._ladder)
        return {"adaptation": self._adaptation.state_dict(), "seen": seen, "ladder": ladder}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`, and change the model to its formats."""
        self.begin()
        self._ladder = Ladder(**state["ladder"])
        if self._ladder.rung:
            self._stand_on(self._planned(self._rungs[self._ladder.rung]))
        self._adaptation.load_state_dict(state["adaptation"])
        self._seen = deque(
            (step, [(kind, module, role) for kind, module, role in issues], list(unsafe_to_lower))
            for step, issues, unsafe_to_lower in state["seen"]
        )
        if self._adaptation.overrides or self._ladder.rung:
            self.apply()

    def _is_left_to_scale(self, kind: str, role: str, loss_scale: float) -> bool:
        """Return whether a lower loss scale fixes this; a wider format would only hide it."""
        room = loss_scale > self._recipe.precision.loss_scale.min_scale
        scaled = self._own.policy.needs_loss_scale and room
        return scaled and kind == "overflow" and role in GRADIENTS

    def _climb(self, step: int) -> PrecisionRecord:
        """Move up or down the ladder, where each module starts in the rung's own formats."""
        before, reason = self._own.policy, self._ladder.reason
        self._ladder = self._ladder.moved(step)
        after = self._rungs[self._ladder.rung]
        self._adaptation.overrides.clear()
        self._stand_on(self._planned(after))
        return PrecisionRecord(
            step=step + 1,
            module=WHOLE,
            before=short_text(before),
            after=short_text(after),
            reason=reason,
        )

    def _planned(self, policy: Policy | None = None) -> Plan:
        return plan_recipe_model(
            self._recipe,
            self._prepared.model,
            policy=self._own.policy if policy is None else policy,
            overrides=self._adaptation.overrides,
            hardware=self._own.hardware,
            gemm_rows=self._gemm_rows,
        )
