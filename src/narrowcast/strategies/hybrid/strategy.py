"""Hybrid training of a recipe.

Every preset predicts the weights of a fallen learning rate: it averages weights under a schedule
longer than the run, and returns the best average. The lookahead (balanced, aggressive) takes each
gradient at a point between the newest weights and their average. The aggressive preset also tries
jumps of the weights; see `phases`.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import collect_weights, put_weights
from narrowcast.runs import EvalRecord, Record, StepRecord, StrategyRecord
from narrowcast.strategies.hybrid.phases import PhaseCourse
from narrowcast.strategies.hybrid.readout.choice import TRAINED
from narrowcast.strategies.hybrid.readout.evaluation import Evaluation
from narrowcast.training.strategy import Measure, Strategy
from narrowcast.training.task import Task


@final
class HybridStrategy(Strategy):
    """Follows the steps of a run; see `training.strategy.Strategy`."""

    def __init__(self, prepared: Prepared, task: Task, recipe: Recipe) -> None:
        self._prepared = prepared
        self._evaluation = Evaluation(prepared, task, recipe)
        self.readouts = self._evaluation.readouts
        self.phases = PhaseCourse(prepared, task, recipe)
        self._accepted = self._rejected = 0

    def before_first_step(self) -> Iterable[Record]:
        """Return the record of the first phase."""
        return self.phases.begin()

    def is_due(self, step: int) -> bool:
        """Return whether a phase ends with this step."""
        return self.phases.is_due(step)

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        """Start the next phase."""
        return self.phases.act(step, batches=batches)

    def after_step(self, outcome: Outcome) -> None:
        """Update averages and the history of weights."""
        self.readouts.after_step(outcome)
        self.phases.after_step(outcome)

    def note(self, record: StepRecord) -> None:
        """Take note of a step's record."""
        self.phases.note(record)

    def evaluate(self, step: int, measure: Measure) -> tuple[EvalRecord, Iterable[Record]]:
        """Select among the candidate weights, and evaluate those that the run would return."""
        began = time.perf_counter()
        judged = self._evaluation.judge(step, measure)
        choice = judged.choice
        averages = len(choice.scores) - 1
        if averages:
            self._accepted += choice.is_average
            self._rejected += not choice.is_average
        record = StrategyRecord(
            step=step,
            phase=self.phases.phase,
            event="readout",
            what=choice.name,
            why=judged.why,
            values=dict(choice.scores),
            seconds=time.perf_counter() - began,
        )
        return EvalRecord(step=step, metrics=dict(judged.metrics)), [record]

    def answer(self) -> Mapping[str, Tensor]:
        """Return the selected weights by name."""
        return self.readouts.weights()

    def put_answer(self) -> Mapping[str, Tensor]:
        """Load the selected weights into the model at the end of a run."""
        answer, state = self.answer(), collect_weights(self._prepared.engine)
        state["weights"] |= answer
        if state["lookahead"] is not None:  # the weights are the answer now
            leads = [None] * len(state["lookahead"]["leads"])
            state["lookahead"] = {**state["lookahead"], "leads": leads}
        put_weights(self._prepared.engine, state)
        self.readouts.chosen = TRAINED
        return answer

    def summary(self, step: int) -> Iterable[Record]:
        """Return the record that sums up phases and selections."""
        readouts = {
            "averages selected": float(self._accepted),
            "averages not selected": float(self._rejected),
        }
        record = StrategyRecord(
            step=step,
            phase=self.phases.phase,
            event="summary",
            what=self.readouts.chosen,
            why="",
            values={**self.phases.statistics(), **readouts},
            seconds=0.0,
        )
        return [record]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on."""
        return {
            "readouts": self.readouts.state_dict(),
            "phases": self.phases.state_dict(),
            "accepted": self._accepted,
            "rejected": self._rejected,
        }

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Change the model to the formats of the saved phase."""
        self.phases.restore_formats(state["phases"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`."""
        self.readouts.load_state_dict(state["readouts"])
        self.phases.load_state_dict(state["phases"])
        self._accepted, self._rejected = int(state["accepted"]), int(state["rejected"])
