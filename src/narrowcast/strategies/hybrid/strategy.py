"""Hybrid training of a recipe: what the trainer asks of a strategy, answered.

Two predictions are made in every preset, and neither moves a weight by itself. The *read-out*
predicts where the weights would be once the learning rate had fallen: averages under a schedule
that is stretched beyond the run, the best of which is returned. The *lookahead point* (balanced,
aggressive) takes each gradient at a point between the newest weights and their average. The third
preset tries jumps of the weights too; see `phases`.
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
from narrowcast.training.strategy import Measure
from narrowcast.training.task import Task


@final
class HybridStrategy:
    """Follows the steps of a run; see `training.strategy.Strategy`."""

    def __init__(self, prepared: Prepared, task: Task, recipe: Recipe) -> None:
        self._prepared = prepared
        self._evaluation = Evaluation(prepared, task, recipe)
        self.readouts = self._evaluation.readouts
        self.phases = PhaseCourse(prepared, task, recipe)
        self._accepted = self._rejected = 0

    def before_first_step(self) -> Iterable[Record]:
        """Tell how the run begins."""
        return self.phases.begin()

    def is_due(self, step: int) -> bool:
        """Return whether a phase ends with this step."""
        return self.phases.is_due(step)

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        """Begin the next phase."""
        return self.phases.act(step, batches=batches)

    def after_step(self, outcome: Outcome) -> None:
        """Let averages and past weights follow."""
        self.readouts.after_step(outcome)
        self.phases.after_step(outcome)

    def note(self, record: StepRecord) -> None:
        """Take in what became of a step."""
        self.phases.note(record)

    def evaluate(self, step: int, measure: Measure) -> tuple[EvalRecord, Iterable[Record]]:
        """Choose among the read-outs, and evaluate what the run would return."""
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
        """Return the read-out that was chosen last, by name."""
        return self.readouts.weights()

    def put_answer(self) -> Mapping[str, Tensor]:
        """Let the model have that read-out; no step is to follow."""
        answer, state = self.answer(), collect_weights(self._prepared.engine)
        state["weights"] |= answer
        if state["lookahead"] is not None:  # the weights are the answer now
            leads = [None] * len(state["lookahead"]["leads"])
            state["lookahead"] = {**state["lookahead"], "leads": leads}
        put_weights(self._prepared.engine, state)
        self.readouts.chosen = TRAINED
        return answer

    def summary(self, step: int) -> Iterable[Record]:
        """Tell what phases and predictions came to."""
        readouts = {
            "read-outs accepted": float(self._accepted),
            "read-outs rejected": float(self._rejected),
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
        """Return what decides what it does from now on."""
        return {
            "readouts": self.readouts.state_dict(),
            "phases": self.phases.state_dict(),
            "accepted": self._accepted,
            "rejected": self._rejected,
        }

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        """Bring the model into the formats of the phase that the run was in."""
        self.phases.restore_formats(state["phases"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved run stood."""
        self.readouts.load_state_dict(state["readouts"])
        self.phases.load_state_dict(state["phases"])
        self._accepted, self._rejected = int(state["accepted"]), int(state["rejected"])
