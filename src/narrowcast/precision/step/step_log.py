"""The ledger: what became of each step, once the host knows, and what follows from it.

Only here does the learning-rate schedule move, and only for a step that was applied.
"""

from typing import Any, Protocol

from narrowcast.errors import DivergedError
from narrowcast.precision.step.outcome import NO_MODULE, Facts, Flight, Outcome
from narrowcast.precision.step.stats import Finding, Stats

AT_FLOOR = "overflow at the smallest loss scale"
"""What is told of an overflow to which the scale cannot give way."""


class Scheduler(Protocol):
    """What is asked of a learning-rate schedule: torch's have it."""

    def step(self) -> None:
        """Move on by one applied step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


class Ledger:
    """Steps in flight, steps counted, and what was found."""

    def __init__(
        self, scheduler: Scheduler | None, *, patience: int, weights: int, scaled: bool
    ) -> None:
        self.stats = Stats()
        self.scaled = scaled
        self._scheduler, self._patience, self._weights = scheduler, patience, weights
        self._in_flight: list[tuple[Flight, Outcome]] = []
        self._findings: list[Finding] = []

    def enter(self, flight: Flight, *, step: int) -> Outcome:
        """Take in a step whose numbers are on their way."""
        outcome = Outcome(step=step, applied_on_device=flight.applied_on_device, sync=self.sync)
        self._in_flight.append((flight, outcome))
        return outcome

    def sync(self) -> None:
        """Wait for every step so far, and let schedule, counts and findings catch up."""
        while self._in_flight:
            flight, outcome = self._in_flight.pop(0)
            facts = flight.land()
            outcome._known = facts, self._count(outcome.step, facts)

    def findings(self) -> list[Finding]:
        """Return what was found since this was last asked."""
        found, self._findings = self._findings, []
        return found

    def refuse_to_go_on(self) -> None:
        """Give up, once every step would be skipped.

        Asked at the beginning of a step, so that the outcome of the one before it is known.
        """
        stats = self.stats
        if stats.overflows_at_floor < self._patience:
            return
        raise DivergedError(
            f"step {stats.steps}: {stats.overflows_at_floor} steps in a row had gradients that are "
            f"not finite{', with the loss scale at its smallest' if self.scaled else ''}; the "
            "weights are those of the last good step",
            f"Look at {stats.bad_module}: {_remedy(stats.bad_module)}",
        )

    def _count(self, step: int, facts: Facts) -> str:
        """Return why the step was skipped; nothing where it was not."""
        self.stats.count(facts)
        if facts.finite:
            if self._scheduler is not None:
                self._scheduler.step()
            return ""
        count = f"{len(facts.bad_parameters)} of {self._weights} weights"
        why = f"gradients of {count} are not finite, nearest the loss {facts.bad_module}"
        if facts.next_scale != facts.loss_scale:
            why += f"; loss scale {facts.loss_scale:g} → {facts.next_scale:g}"
        if self.stats.overflows_at_floor == 1:
            floor = f"; the scale is {facts.loss_scale:g} and may not go lower"
            self._findings.append(
                Finding(
                    step=step,
                    since=step - self.stats.overflows_in_a_row + 1,
                    module=facts.bad_module,
                    role="grad_weight",
                    what=AT_FLOOR if self.scaled else "overflow",
                    why=why + (floor if self.scaled else ""),
                    action=f"the step is skipped; after {self._patience} in a row training stops",
                    advice=_remedy(self._one_to_blame(facts)),
                )
            )
        return why

    def _one_to_blame(self, facts: Facts) -> str:
        """Return the module nearest the loss; where every gradient is bad that says nothing."""
        everywhere = len(facts.bad_parameters) == self._weights > 1
        return NO_MODULE if everywhere else facts.bad_module


def _remedy(module: str) -> str:
    if module == NO_MODULE:
        return "try a lower optimizer.lr, a wider precision.policy, or the data"
    return f'try precision.overrides={{"{module}": fp32}}, a lower optimizer.lr, or the data'
