"""Hooks that a training strategy has between the steps of a run.

A strategy moves no counter, draws no random number and reads no batch of the run. It may take a
step without a backward pass on the batches of that step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from narrowcast.precision.step.outcome import Outcome
from narrowcast.runs import EvalRecord, Record, StepRecord

Measure = Callable[[], dict[str, float]]
"""Evaluates the current model."""


class Strategy:
    """Hooks around the steps of a run; these defaults are plain training."""

    def before_first_step(self) -> Iterable[Record]:
        """Return the first records of a run; not called when it is resumed."""
        return ()

    def is_due(self, step: int) -> bool:
        """Return whether `act` has something to do after this step; must not synchronise.

        It may depend on `act` and on records up to the step before, so that a resumed run decides
        like one that was not interrupted.
        """
        return False

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        """Act after a step, when `batches` were read; may change weights and formats."""
        return ()

    @property
    def is_forward_only(self) -> bool:
        """Whether the next step is a `forward_step`."""
        return False

    def forward_step(self, batches: Sequence[Any]) -> tuple[Outcome, Tensor]:
        """Take a step without a backward pass. Must not synchronise.

        Returns its outcome, and the mean loss with its parts on the device.
        """
        raise NotImplementedError

    def after_step(self, outcome: Outcome) -> None:
        """Queue work after every step; must not synchronise."""

    def note(self, record: StepRecord) -> None:
        """Take note of a step's record; called once per step, in order."""

    def evaluate(self, step: int, measure: Measure) -> tuple[EvalRecord, Iterable[Record]]:
        """Evaluate the weights that the run would return now; the model's weights do not change."""
        return EvalRecord(step=step, metrics=measure()), ()

    def use_answer(self) -> AbstractContextManager[None]:
        """Use the weights of the last evaluation inside the block."""
        return nullcontext()

    def answer(self) -> Mapping[str, Tensor]:
        """Return copies of the weights to return instead of the model's, in fp32, by name."""
        return {}

    def put_answer(self) -> Mapping[str, Tensor]:
        """Load these weights into the model at the end of a run, and return them."""
        return {}

    def summary(self, step: int) -> Iterable[Record]:
        """Return records that sum up the run, after its last step."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on."""
        return {}

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Change the model to the formats it had when this state was saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`; weights and formats of the model are restored already."""


PLAIN = Strategy()
