"""Jumps of the weights in a run of a recipe: when one is tried, on which batches, what it did."""

import math
import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any, final

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord, Record, StepRecord, StrategyRecord
from narrowcast.strategies.hybrid.divergence import DivergenceMonitor
from narrowcast.strategies.hybrid.history import FEWEST_SNAPSHOTS, SNAPSHOTS
from narrowcast.strategies.hybrid.jumper import Jumper, attempt_cost
from narrowcast.strategies.hybrid.phase_formats import PhaseFormats
from narrowcast.strategies.hybrid.readout.choice import STEP_COST
from narrowcast.training.data import BatchStream, batch_order
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.step.losses import Losses
from narrowcast.training.task import Task

SHORTEST_JUMP = 10
"""Steps of the shortest prediction, where `max_predict_steps` allows as many."""


@final
class JumpCourse:
    """Decides on the jumps of a run, and tries them between two steps."""

    def __init__(
        self, prepared: Prepared, task: Task, recipe: Recipe, *, formats: PhaseFormats
    ) -> None:
        check_first_jump(recipe)
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._formats = formats
        self._losses = Losses(prepared, task)
        self._jumper = Jumper(
            prepared,
            every=snapshot_interval(recipe),
            budget=jump_budget(recipe),
            batches=recipe.strategy.jumps.micro_batches,
        )
        self._monitor = DivergenceMonitor(sigma=recipe.strategy.phases.divergence_sigma)
        self._divergences = 0

    def after_step(self, outcome: Outcome) -> None:
        """Store the weights where a snapshot is due; does not wait for the device."""
        self._jumper.observe(outcome.step)

    def note(self, record: StepRecord) -> None:
        """Look for divergence in a step that was applied."""
        if record.applied:
            self._monitor = self._monitor.after(record.loss, record.grad_norm)

    def divergence(self) -> str:
        """Return how the run diverged since this was last called; empty if it did not."""
        problem, self._monitor = self._monitor.problem, self._monitor.cleared()
        self._divergences += bool(problem)
        return problem

    def refusal(self) -> str:
        """Return why no jump is tried now; empty if one is."""
        account, threshold = self._jumper.account, self._recipe.strategy.phases.confidence_threshold
        if not account.is_confident(threshold):
            return f"a jump is accepted with a probability of {account.confidence:.2f}"
        if len(self._jumper.history) < FEWEST_SNAPSHOTS:
            return "too few past weights are known yet"
        return self._jumper.refusal()

    def jump(self, step: int, *, batches: int) -> list[Record]:
        """Try a jump after a step, on the batches that training reads next."""
        began, account = time.perf_counter(), self._jumper.account
        confidence = account.confidence
        horizon = jump_length(self._recipe.strategy.phases.max_predict_steps, confidence)
        changes: list[PrecisionRecord] = self._formats.apply("predict", step=step)
        self._prepared.engine.weights.forget_gradients()  # no trial needs their memory

        def correct() -> None:
            changes.extend(self._formats.apply("correct", step=step))

        task, recipe, device = self._task, self._recipe, self._prepared.engine.weights.device
        with (
            preserve_rng(device),
            BatchStream(
                task.train_data,
                batch_order(len(task.train_data), recipe),
                start=batches,
                device=device,
                collate=task.collate,
            ) as stream,
        ):
            next_batches = list(islice(stream, recipe.strategy.jumps.micro_batches))
            result = self._jumper.jump(
                horizon, partial(self._compute_losses, next_batches), before_correction=correct
            )
        ending = "accepted" if result.accepted else "rejected"
        record = StrategyRecord(
            step=step,
            phase="predict",
            event="jump",
            what=f"line, {horizon} {'step' if horizon == 1 else 'steps'}: {ending}",
            why=result.why,
            values={
                "accepted": float(result.accepted),
                "horizon": float(horizon),
                "scale": result.scale,
                "gain": result.gain,
                "standard error": result.standard_error,
                "confidence": confidence,
                "forward passes": self._jumper.account.spent - account.spent,
            },
            seconds=time.perf_counter() - began,
        )
        return [*changes, record]

    def statistics(self, *, steps: int) -> dict[str, float]:
        """Return what jumps did and cost in so many steps, by name."""
        account = self._jumper.account
        return {
            "jumps tried": float(account.tried),
            "jumps accepted": float(account.accepted),
            "forward passes spent": account.spent,
            "step equivalents": steps
            + account.spent / (STEP_COST * self._recipe.gradient_accumulation_steps),
            "divergences": float(self._divergences),
            "history bytes": float(self._jumper.history.bytes()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "jumper": self._jumper.state_dict(),
            "monitor": self._monitor.to_json(),
            "divergences": self._divergences,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._jumper.load_state_dict(state["jumper"])
        self._monitor = DivergenceMonitor(**state["monitor"])
        self._divergences = int(state["divergences"])

    def _compute_losses(self, batches: list[Any]) -> list[float]:
        model = self._prepared.model
        losses = []
        with in_eval_mode(model):
            for batch in batches:
                (one,) = self._task.as_one_step([batch])
                with self._prepared.autocast():
                    losses.append(self._losses.of(model, one).total.detach())
        return [float(loss) for loss in losses]


def jump_length(longest: int, confidence: float) -> int:
    """Return how many steps a jump replaces: more if it is likelier to be accepted."""
    return max(min(SHORTEST_JUMP, longest), math.floor(longest * confidence**2))


def snapshot_interval(recipe: Recipe) -> int:
    """Return the steps between two snapshots: a full phase fills the history."""
    return max(1, recipe.strategy.phases.full_steps // (SNAPSHOTS - 1))


def jump_budget(recipe: Recipe) -> float:
    """Return the forward passes that the jumps of a run may cost."""
    return (
        recipe.strategy.jumps.budget * recipe.steps * STEP_COST * recipe.gradient_accumulation_steps
    )


def check_first_jump(recipe: Recipe) -> None:
    """Raise if no jump can be tried: the run ends before one is due, or its budget is too small."""
    strategy = recipe.strategy
    full_steps = strategy.phases.full_steps
    first = strategy.warmup_steps(recipe.steps) + full_steps
    while first <= (FEWEST_SNAPSHOTS - 1) * snapshot_interval(recipe):
        first += full_steps
    if first >= recipe.steps:
        raise ConfigError(
            f"strategy.preset=aggressive cannot try a jump before step {first}, got "
            f"steps={recipe.steps}. Write steps={2 * first} or more, a shorter "
            "strategy.phases.warmup_steps or full_steps, or strategy.preset=balanced."
        )
    cost, budget = attempt_cost(strategy.jumps.micro_batches), jump_budget(recipe)
    if cost > budget:
        share = math.ceil(1000 * cost * strategy.jumps.budget / budget) / 1000
        steps = math.ceil(cost * recipe.steps / budget)
        larger = f"strategy.jumps.budget={share:g} or more, " if share <= 1 else ""
        raise ConfigError(
            f"strategy.preset=aggressive cannot try a jump: one costs up to {cost:g} forward "
            f"passes, and strategy.jumps.budget allows {budget:.4g} in {recipe.steps} steps, got "
            f"strategy.jumps.budget={strategy.jumps.budget:g}. Write {larger}steps={steps} or "
            "more, or strategy.preset=balanced."
        )
