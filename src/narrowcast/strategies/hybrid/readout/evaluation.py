"""Evaluation with candidate weights: select one, and evaluate it in full.

If the task has its held-out data in parts, the candidates are compared on as many parts as the
budget allows. Half of it is kept for the last evaluation, where the selection is final.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.config.strategy import ReadoutSection
from narrowcast.errors import ConfigError, blamed_on
from narrowcast.precision.step.prepared import Prepared
from narrowcast.strategies.hybrid.budget import STEP_COST, ChoosingBudget
from narrowcast.strategies.hybrid.readout.choice import Choice, Readouts, half_lives_in_steps
from narrowcast.training.strategy import Measure
from narrowcast.training.task import EvalBatches, Task

BEFORE_THE_END = 0.5
"""Share of the budget for all evaluations but the last."""


@dataclass(frozen=True, kw_only=True)
class SelectedWeights:
    """Result of an evaluation."""

    choice: Choice
    """Scores are the headline in full; for others compared on parts, their difference is added."""
    metrics: Mapping[str, float]
    """Metrics of the selected weights, on all held-out data."""
    why: str


@final
class Evaluation:
    """Evaluates the candidate weights of a run."""

    def __init__(self, prepared: Prepared, task: Task, recipe: Recipe) -> None:
        settings = recipe.strategy.readout
        if task.held_out is None and settings.budget != ReadoutSection().budget:
            raise ConfigError(
                "strategy.readout.budget needs a task with held-out data in parts, got "
                f"strategy.readout.budget={settings.budget:g}. This task evaluates every average "
                "in full. Leave the budget out, or write fewer strategy.readout.half_lives."
            )
        self._prepared, self._headline, self._held = prepared, task.info.headline, task.held_out
        self._last_step = recipe.steps
        self.readouts = Readouts(
            prepared,
            half_lives=half_lives_in_steps(settings.half_lives, recipe.steps),
            every=settings.every,
            budget=ChoosingBudget(
                share=settings.budget, step_cost=STEP_COST * recipe.gradient_accumulation_steps
            ),
        )

    def judge(self, step: int, measure: Measure) -> SelectedWeights:
        """Select among the candidates, and evaluate the selected one on all held-out data."""
        names = len(self.readouts.names)
        if self._held is None or names == 1:
            return self._in_full(measure)
        part = 1.0 if step >= self._last_step else BEFORE_THE_END
        passes = self.readouts.budget.left(step, part=part)
        more = self._held.parts * (names - 1)  # than the evaluation that is made anyway
        if more <= max(passes, names):
            self.readouts.budget = self.readouts.budget.after_spending(min(more, passes))
            return self._in_full(measure)
        return self._on_parts(self._held, measure, step=step, passes=passes)

    def _in_full(self, measure: Measure) -> SelectedWeights:
        measured = dict[str, dict[str, float]]()

        def headline(name: str) -> float:
            measured[name] = measure()
            return measured[name][self._headline.name]

        choice = self.readouts.choose(headline, better=self._headline.better)
        why = f"best {self._headline.name} of {len(choice.scores)} candidates"
        return SelectedWeights(choice=choice, metrics=measured[choice.name], why=why)

    def _on_parts(
        self, held: EvalBatches, measure: Measure, *, step: int, passes: float
    ) -> SelectedWeights:
        # Others at every step, so that no part decides for all of a run; the same after a resume.
        order = torch.randperm(held.parts, generator=torch.Generator().manual_seed(step))

        def headline(part: int) -> float | Tensor:
            with self._prepared.autocast(), blamed_on("held_out of the task"):
                return held.headline(self._prepared.model, part)

        better = self._headline.better
        chosen, raced = self.readouts.choose_on(
            order.tolist(), headline, better=better, passes=passes
        )
        with self.readouts.swapped_in():
            metrics = measure()
        scores = raced.scores(chosen.name, at=metrics[self._headline.name])
        choice = Choice(name=chosen.name, scores=scores, batches=chosen.batches)
        few, many = min(choice.batches.values()), max(choice.batches.values())
        message = f"{few}" if few == many else f"{few} to {many}"
        why = (
            f"best {self._headline.name} of {len(scores)} candidates on {message} of {held.parts} "
            "held-out batches, then evaluated on all"
        )
        return SelectedWeights(choice=choice, metrics=metrics, why=why)
