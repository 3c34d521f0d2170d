"""Evaluation during a run, without a trace in weights, modes or random generators."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch
from torch import nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError, blamed_on
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.health.diagnose.passes import eagerly
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import EvalRecord, FindingRecord, Record, SampleRecord, TaskInfo
from narrowcast.runs.task_info import AVERAGED
from narrowcast.runs.vitals import WEIGHTS_NOT_FINITE
from narrowcast.training.checkpoints.frozen import FrozenWeights
from narrowcast.training.ending import BestWeights, EarlyStopping
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.strategy import Strategy
from narrowcast.training.task import Task
from narrowcast.training.vital_signs import VitalSigns, bad_weights

SAMPLE_SHARE = 0.02
"""Largest cost of text for the report, as a share of the run's work."""
MOST_SAMPLED = 8
"""Evaluations that draw text; more than that nobody reads."""


def evaluate(prepared: Prepared, task: Task) -> dict[str, float]:
    """Return the task's metrics, and with an EMA the same as `ema_…` for the averaged weights."""
    model = prepared.model
    device = next(model.parameters()).device
    with preserve_rng(device), in_eval_mode(model), torch.no_grad():
        with prepared.autocast():
            metrics = _measured(task, model)
        _require_declared(metrics, task.info)
        if prepared.has_ema:
            with prepared.use_ema(), prepared.autocast():
                averaged = _measured(task, model)
            metrics |= {f"{AVERAGED}{key}": value for key, value in averaged.items()}
    return metrics


def not_finite(
    metrics: Mapping[str, float], weights: str, *, step: int, lr: str
) -> Iterator[FindingRecord]:
    """Yield findings for nonfinite weights, which an update can cause, and for metrics."""
    if weights:
        yield _finding(
            step,
            role="weight",
            what=WEIGHTS_NOT_FINITE,
            why=weights,
            advice=f"resume from an earlier checkpoint with a lower {lr}",
        )
    bad = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        yield _finding(
            step,
            role="evaluation",
            what="evaluation not finite",
            why=f"{', '.join(bad)}; the evaluation ran in the formats of training, on weights that "
            + ("are not finite" if weights else "are finite"),
            advice=""
            if weights
            else (
                "check the skipped steps before it and the evaluation data, or use a wider "
                "precision.policy"
            ),
        )


def _finding(step: int, *, role: str, what: str, why: str, advice: str) -> FindingRecord:
    return FindingRecord(
        step=step,
        since=step,
        module="",
        role=role,
        what=what,
        why=why,
        action="",
        advice=advice,
    )


@final
class Evaluations:
    """Evaluates a run; tracks divergence, early stopping and the best weights."""

    def __init__(
        self,
        prepared: Prepared,
        task: Task,
        recipe: Recipe,
        *,
        frozen: FrozenWeights,
        folder: Path | None,
        strategy: Strategy,
        ranks: RunRanks = ALONE,
    ) -> None:
        self._prepared, self._task, self._strategy = prepared, task, strategy
        self._sampled_at = sampled_steps(recipe, task)
        self._ranks = ranks
        self.vital_signs = VitalSigns(prepared, task, folder=folder)
        self.early_stopping = EarlyStopping(recipe.eval, task.info)
        self.best_weights = BestWeights(
            prepared, frozen, folder=folder, wanted=recipe.eval.keep_best, ranks=ranks
        )

    def measure(self, step: int) -> tuple[EvalRecord, Iterable[Record]]:
        """Evaluate the weights that the run would return now; the metrics of rank 0 count."""
        judged, others = self._strategy.evaluate(
            step, lambda: self._ranks.from_main(evaluate(self._prepared, self._task))
        )
        return judged, [*others, *self._sampled(step)]

    def account(self, judged: EvalRecord, others: Iterable[Record]) -> Iterator[Record]:
        """Yield the records of an evaluation, and save its weights if they are the best."""
        step, lr = judged.step, self._prepared.engine.log.wording.lr
        bad = not_finite(judged.metrics, self._bad_weights(), step=step, lr=lr)
        records: list[Record] = [judged, *bad]
        for record in records:
            self.vital_signs.note(record)
            self.early_stopping.note(record)
            yield record
        yield from others
        if self.early_stopping.improvement.best_step == step:
            self.best_weights.keep(step, answer=self._strategy.answer)

    def _sampled(self, step: int) -> list[SampleRecord]:
        """Return text of the weights that were just evaluated, if it is due."""
        samples, model = self._task.samples, self._prepared.model
        if samples is None or step not in self._sampled_at:
            return []
        began = time.perf_counter()
        with (
            preserve_rng(next(model.parameters()).device),
            in_eval_mode(model),
            torch.no_grad(),
            eagerly(),
            self._strategy.use_answer(),
            self._prepared.autocast(),
            blamed_on("the task's samples"),
        ):
            drawn = samples.draw(model)
        seconds = (time.perf_counter() - began) / max(1, len(drawn))
        return [
            SampleRecord(step=step, prompt=prompt, text=text, seconds=seconds)
            for prompt, text in drawn
        ]

    def _bad_weights(self) -> str:
        """Return which weights are not finite on any rank, as text."""
        return next(filter(None, self._ranks.gathered(bad_weights(self._prepared))), "")


def sampled_steps(recipe: Recipe, task: Task) -> frozenset[int]:
    """Return the steps whose evaluations draw text: evenly spaced, the last one among them.

    Known beforehand, so that a resumed run draws the same.
    """
    if task.samples is None:
        return frozenset()
    every = recipe.eval.every or recipe.steps
    steps = [*range(every, recipe.steps, every), recipe.steps]
    passes = 3 * recipe.steps * recipe.gradient_accumulation_steps  # a backward pass costs two
    count = min(len(steps), MOST_SAMPLED, int(SAMPLE_SHARE * passes / task.samples.passes))
    return frozenset(steps[-(-len(steps) * k // count) - 1] for k in range(1, count + 1))


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode inside the block, then restore each mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _measured(task: Task, model: nn.Module) -> dict[str, float]:
    with blamed_on("the task's evaluation"):
        metrics = task.evaluate(model)
    return _numbers(metrics)


def _numbers(metrics: object) -> dict[str, float]:
    """Return metrics as floats; tensors and NumPy scalars of one element are converted."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "The task's evaluate must return a dict of numbers by name, got a "
            f"{type(metrics).__name__}. Return e.g. {{'accuracy': 0.9}}."
        )
    result = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, bool | str):
                raise TypeError
            result[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"The task's evaluate must return numbers, got {name}={value!r}. Return e.g. "
                "tensor.mean().item()."
            ) from None
    return result


def _require_declared(metrics: Mapping[str, float], info: TaskInfo) -> None:
    declared = [metric.name for metric in info.metrics]
    if unknown := [name for name in metrics if name not in declared]:
        raise ConfigError(
            "The task's evaluate must return metrics that info.metrics declares "
            f"({', '.join(declared)}), got {', '.join(unknown)}. Add a Metric for each, with "
            "better='lower' or 'higher'."
        )
    if info.headline.name not in metrics:
        raise ConfigError(
            f"The task's evaluate must return {info.headline.name}, the first of info.metrics, got "
            f"{', '.join(metrics) or 'no metrics'}. Runs are compared by it."
        )
