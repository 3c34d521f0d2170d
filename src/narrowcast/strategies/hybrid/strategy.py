"""Hybrid training of a recipe: averages, lookahead and predictions, as its preset selects."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.config.strategy import ReadoutSection
from narrowcast.errors import ConfigError, blamed_on
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import collect_weights, put_weights
from narrowcast.runs import EvalRecord, Record, StepRecord, StrategyRecord
from narrowcast.strategies.hybrid.phase_formats import PhaseFormats
from narrowcast.strategies.hybrid.phases import PhaseCourse
from narrowcast.strategies.hybrid.readout.choice import (
    STEP_COST,
    TRAINED,
    Choice,
    ChoosingBudget,
    Readouts,
    half_lives_in_steps,
)
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.setup import make_loss_scales
from narrowcast.training.step.losses import Losses
from narrowcast.training.strategy import Measure, Strategy
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

    def __init__(
        self, prepared: Prepared, task: Task, recipe: Recipe, *, ranks: RunRanks = ALONE
    ) -> None:
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
            agreed=ranks.from_main,
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


def _phase_formats(prepared: Prepared, task: Task, recipe: Recipe) -> PhaseFormats:
    """Return the formats of each phase of a recipe."""

    def planned(policy: str) -> Plan:
        return plan_recipe_model(
            recipe,
            prepared.model,
            policy=policy,
            hardware=prepared.plan.hardware,
            gemm_rows=task.gemm_rows,
        )

    return PhaseFormats(
        prepared,
        recipe.strategy,
        policy=recipe.precision.policy,
        planned=planned,
        loss_scale=make_loss_scales(recipe.precision.loss_scale, task),
    )


@final
class HybridStrategy(Strategy):
    """Follows the steps of a run; see `training.strategy.Strategy`."""

    def __init__(
        self, prepared: Prepared, task: Task, recipe: Recipe, *, ranks: RunRanks = ALONE
    ) -> None:
        self._prepared = prepared
        self._evaluation = Evaluation(prepared, task, recipe, ranks=ranks)
        self.readouts = self._evaluation.readouts
        self._losses = Losses(prepared, task)
        self.phases = PhaseCourse(
            prepared,
            recipe.strategy,
            steps=recipe.steps,
            micro_batches=recipe.gradient_accumulation_steps,
            formats=_phase_formats(prepared, task, recipe),
        )
        self._accepted = self._rejected = 0

    def before_first_step(self) -> Iterable[Record]:
        return self.phases.begin()

    def is_due(self, step: int) -> bool:
        return self.phases.is_due(step)

    def act(self, step: int, *, batches: int) -> Iterable[Record]:
        return self.phases.act(step)

    @property
    def is_forward_only(self) -> bool:
        return self.phases.is_forward_only

    def forward_step(self, batches: Sequence[Any]) -> tuple[Outcome, Tensor]:
        def losses() -> Tensor:
            rows = []
            for batch in batches:
                with self._prepared.autocast():
                    rows.append(self._losses.mean([self._losses.of(self._prepared.model, batch)]))
            return torch.stack(rows)

        return self.phases.compare(losses)

    def after_step(self, outcome: Outcome) -> None:
        self.readouts.after_step(outcome)
        self.phases.after_step(outcome)

    def note(self, record: StepRecord) -> None:
        self.phases.note(loss=record.loss, grad_norm=record.grad_norm, applied=record.applied)

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

    def use_answer(self) -> AbstractContextManager[None]:
        return self.readouts.swapped_in()

    def answer(self) -> Mapping[str, Tensor]:
        return self.readouts.weights()

    def put_answer(self) -> Mapping[str, Tensor]:
        answer, state = self.answer(), collect_weights(self._prepared.engine)
        state["weights"] |= answer
        if state["lookahead"] is not None:  # the weights are the answer now
            leads = [None] * len(state["lookahead"]["leads"])
            state["lookahead"] = {**state["lookahead"], "leads": leads}
        put_weights(self._prepared.engine, state)
        self.readouts.chosen = TRAINED
        return answer

    def summary(self, step: int) -> Iterable[Record]:
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
        return {
            "readouts": self.readouts.state_dict(),
            "phases": self.phases.state_dict(),
            "accepted": self._accepted,
            "rejected": self._rejected,
        }

    def restore_formats(self, state: Mapping[str, Any]) -> None:
        self.phases.restore_formats(state["phases"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.readouts.load_state_dict(state["readouts"])
        self.phases.load_state_dict(state["phases"])
        self._accepted, self._rejected = int(state["accepted"]), int(state["rejected"])
