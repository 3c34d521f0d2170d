"""What became of each step, once the host knows, and what follows from it.

Only here does the learning-rate schedule move, and only for a step that was applied.
"""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from narrowcast.errors import DivergedError
from narrowcast.numerics import FP32
from narrowcast.precision.fp8.first_scales import StepCounts
from narrowcast.precision.plan.wording import Wording
from narrowcast.precision.step.outcome import NO_MODULE, Outcome
from narrowcast.precision.step.schedules import Schedules
from narrowcast.precision.step.stats import Stats
from narrowcast.runs import FindingRecord

AT_FLOOR = "overflow at the smallest loss scale"
"""What is told of an overflow to which the scale cannot give way."""


Losing = Literal["never", "by chance", "always"]
"""When rounding loses the update of a weight that is smaller than its spacing."""
NOTHING_MOVED = "no weight moved"
"""What is told of an applied step without any effect."""


class StepLog:
    """Steps in flight, steps counted, and what was found."""

    def __init__(
        self,
        schedules: Schedules,
        *,
        max_skipped_steps: int,
        weights: Mapping[str, Tensor],
        scaled: bool,
        wording: Wording,
    ) -> None:
        self.stats = Stats()
        self.scaled = scaled
        self.params_lose: Losing = "never"
        """Whether rounding may be why an update is lost."""
        self._schedules, self._patience, self._weights = schedules, max_skipped_steps, weights
        self.wording = wording
        """How advice to the run's owner is written."""
        self._in_flight: list[Outcome] = []
        self._findings: list[FindingRecord] = []

    def enter(self, outcome: Outcome) -> None:
        """Take in a step whose numbers are on their way."""
        self._in_flight.append(outcome)

    def sync(self) -> None:
        """Wait for every step so far, and let schedule, counts and findings catch up."""
        while self._in_flight:
            outcome = self._in_flight.pop(0)
            outcome.arrive()
            outcome.explain(self._count(outcome))

    def counts(self) -> StepCounts:
        """Return how many steps there were so far. Waits for the device."""
        self.sync()
        return StepCounts(applied=self.stats.applied, skipped=self.stats.skipped)

    def findings(self) -> list[FindingRecord]:
        """Return what was found since this was last asked."""
        matches, self._findings = self._findings, []
        return matches

    def check_not_diverged(self) -> None:
        """Give up, once every step would be skipped.

        Asked at the beginning of a step, so that the outcome of the one before it is known. Waits
        for the device only where training ends.
        """
        stats = self.stats
        if stats.overflows_at_floor < self._patience:
            return
        fact = (
            f"step {stats.steps}: {stats.overflows_at_floor} steps in a row had inf or NaN "
            f"gradients{(', with the loss scale at its minimum' if self.scaled else '')}"
        )
        bad = [name for name, weight in self._weights.items() if not weight.isfinite().all()]
        if bad:
            lr = self.wording.lr
            raise DivergedError(
                f"{fact}; {len(bad)} of {len(self._weights)} weights are inf or NaN too, the "
                f"first is {bad[0]}",
                "Restore an earlier checkpoint. Then check what else writes to the weights, such "
                f"as a hook, or try a lower {lr}.",
            )
        raise DivergedError(
            f"{fact}; the weights are those of the last applied step",
            f"Look at {stats.bad_module}: {_remedy(stats.bad_module, self.wording)}.",
        )

    def _count(self, outcome: Outcome) -> str:
        """Return why the step was skipped; nothing where it was not."""
        stood_still = self.stats.lost_updates == 1.0
        self.stats.count(outcome)
        if outcome.applied:
            # Once, as long as it lasts. A learning rate of zero is meant so: a schedule may begin
            # with one, and at one below the digits of fp32 nothing moves that has all of them.
            lost = outcome.lost_updates == 1.0 and self.params_lose != "by chance"
            smallest = FP32.epsilon if self.params_lose == "never" else 0.0
            if lost and not stood_still and not outcome.lr <= smallest:
                self._tell_of_standing_still(outcome)
            self._schedules.step()
            return ""
        count = f"{len(outcome.bad_parameters)} of {len(self._weights)} weights"
        why = f"gradients of {count} are inf or NaN, nearest the loss: {outcome.bad_module}"
        if outcome.next_scale != outcome.loss_scale:
            why += f"; loss scale {outcome.loss_scale:g} → {outcome.next_scale:g}"
        if self.stats.overflows_at_floor == 1:
            floor = f"; the scale is {outcome.loss_scale:g}, its minimum"
            self._findings.append(
                FindingRecord(
                    step=outcome.step,
                    since=outcome.step - self.stats.overflows_in_a_row + 1,
                    module=outcome.bad_module,
                    role="grad_weight",
                    what=AT_FLOOR if self.scaled else "overflow",
                    why=why + (floor if self.scaled else ""),
                    action=f"the step is skipped; training stops after {self._patience} in a row",
                    advice=_remedy(self._one_to_blame(outcome), self.wording),
                )
            )
        return why

    def _tell_of_standing_still(self, outcome: Outcome) -> None:
        narrow = (
            "write master=split, because 16-bit weights lose updates below half their spacing; or "
        )
        advice = (narrow if self.params_lose == "always" else "") + (
            "try a higher learning rate, and check that the optimizer updates the weights in its "
            "param_groups"
        )
        self._findings.append(
            FindingRecord(
                step=outcome.step,
                since=outcome.step,
                module="",
                role="update",
                what=NOTHING_MOVED,
                why="the step was applied, but no weight changed",
                action="",
                advice=advice,
            )
        )

    def _one_to_blame(self, outcome: Outcome) -> str:
        """Return the module nearest the loss; where every gradient is bad that says nothing."""
        everywhere = len(outcome.bad_parameters) == len(self._weights) > 1
        return NO_MODULE if everywhere else outcome.bad_module


def _remedy(module: str, terms: Wording) -> str:
    # Which number came first is not known here, and so not what would help.
    ask = "" if terms.in_recipe else "; narrowcast.explain shows which value became bad first"
    if module == NO_MODULE:
        wider = "a wider precision.policy" if terms.in_recipe else "a wider policy"
        return f"try a lower {terms.lr} or {wider}, or check the data{ask}"
    if terms.policy.for_module(module).forward == "fp32":
        return f"try a lower {terms.lr}, or check the data{ask}"
    return f"try {terms.wider(module, 'fp32')} or a lower {terms.lr}, or check the data{ask}"
