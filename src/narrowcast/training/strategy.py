"""What a strategy may do around the steps of a run. The trainer asks; plain training has none.

A strategy never moves a counter of the run, draws no random number of the run's and reads no batch
that the run would read: without it, or with it switched off, the run is the same bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, final

from torch import Tensor

from narrowcast.precision.step.outcome import Outcome
from narrowcast.runs import EvalRecord, Record, StepRecord

Measure = Callable[[], dict[str, float]]
"""Evaluates the model as it is now."""


class Strategy(Protocol):
    """A way to get by with fewer steps."""

    def before_first_step(self) -> Iterable[Record]:
        """Tell how the run begins; not called when it is resumed."""

    def is_due(self, step: int) -> bool:
        """Say whether there is something to do between this step and the next; waits for nothing.

        A function of what `act` has decided and of records up to the step before: a run that is
        resumed must answer as one that was not.
        """

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        """Do what is due after a step, and tell of it; `batches` have been read so far.

        Every record up to `step` was noted. Weights and formats may be others afterwards.
        """

    def after_step(self, outcome: Outcome) -> None:
        """Queue what follows every step; waits for nothing, and `outcome` is not read."""

    def note(self, record: StepRecord) -> None:
        """Take in what became of a step, each once and in their order."""

    def evaluate(self, step: int, measure: Measure) -> tuple[EvalRecord, Iterable[Record]]:
        """Evaluate what the run would return now, and say what that is; leaves weights alone."""

    def answer(self) -> Mapping[str, Tensor]:
        """Return the weights that the run would return now, in fp32, by name; copies."""

    def put_answer(self) -> Mapping[str, Tensor]:
        """Let the model have these weights at the end of a run, and return them."""

    def summary(self, step: int) -> Iterable[Record]:
        """Tell what it came to, once the last step is done."""

    def state_dict(self) -> dict[str, Any]:
        """Return what decides what it does from now on."""

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Bring the model into the formats that it had when this state was saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved run stood; the model has its weights and formats already."""


@final
class Plain:
    """Plain training: nothing but its steps."""

    def before_first_step(self) -> Iterable[Record]:
        """Tell of nothing."""
        return ()

    def is_due(self, step: int) -> bool:
        """Say that there is nothing to do."""
        return False

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        """Do nothing."""
        return ()

    def after_step(self, outcome: Outcome) -> None:
        """Queue nothing."""

    def note(self, record: StepRecord) -> None:
        """Take in nothing."""

    def evaluate(self, step: int, measure: Measure) -> tuple[EvalRecord, Iterable[Record]]:
        """Evaluate the weights as they are."""
        return EvalRecord(step=step, metrics=measure()), ()

    def answer(self) -> Mapping[str, Tensor]:
        """Return no weights but those of the model."""
        return {}

    def put_answer(self) -> Mapping[str, Tensor]:
        """Leave the model its weights."""
        return {}

    def summary(self, step: int) -> Iterable[Record]:
        """Tell of nothing."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Leave the model its formats."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up nothing."""


PLAIN = Plain()
